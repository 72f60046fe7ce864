// A message on the page: its text, its buttons, and its timings and token counts.

import { copyButton, count, duration, el } from "../dom.js";
import { imageView } from "./image_list.js";
import { loadThumbnail } from "./images.js";
import { rendered } from "./markdown.js";

const NAMES = { user: "You", tool: "Tool" };

/**
 * Element that shows the latest state of a message.
 *
 * `actions` are the functions of its buttons: edit(message, text, images), again(message), turn(message, by), result(message,
 * call, text). `place` is its index among its siblings, and their number.
 */
export class MessageView {
  constructor(message, place, actions) {
    this.message = message;
    this.place = place;
    this.actions = actions;
    this.dot = el("span", { className: "dot" });
    this.body = el("div", { className: "body" });
    this.images = el("div", { className: "images" });
    this.showImages(message.images ?? []);
    this.reasoning = el("div", { className: "text" });
    this.reasoningPart = el("details", { className: "reasoning", hidden: true });
    this.reasoningTitle = el("summary", { textContent: "Reasoning" });
    this.reasoningPart.append(this.reasoningTitle, this.reasoning);
    this.calls = el("div");
    this.wait = el("div", { className: "waiting", hidden: true });
    this.foot = el("div", { className: "foot" });
    this.name = el("span");
    const who = el("div", { className: "who" }, message.role === "assistant" ? this.dot : null, this.name);
    this.element = el("article", { className: `message ${message.role}` });
    this.isPlain = false; // true if its Markdown could not be laid out
    const parts = message.role === "assistant" ? [this.reasoningPart, this.body, this.calls, this.wait] : [this.images, this.body];
    this.element.append(who, ...parts, this.foot);
    this.update();
  }

  /** Show the current state of the message. */
  update() {
    const { message } = this;
    this.name.textContent = NAMES[message.role] ?? message.model ?? "Model";
    this.element.setAttribute("aria-label", this.name.textContent);
    if (message.role === "assistant") {
      this.showContent();
      this.reasoningPart.hidden = !message.reasoning;
      this.reasoning.textContent = message.reasoning;
      const isThinking = message.state === "running" && !message.content;
      this.reasoningTitle.textContent = isThinking ? "Reasoning …" : "Reasoning";
      this.showCalls();
    } else {
      this.body.textContent = message.content;
      this.body.hidden = !message.content && Boolean(message.images);
    }
    if (message.state !== "running") this.waiting(null);
    this.showFoot();
  }

  /** Show images, each with a button that calls `remove(image)` if it is given. */
  showImages(images, remove = null) {
    const views = images.map((image) => imageView(image.name, loadThumbnail(image.id), remove && (() => remove(image))));
    this.images.replaceChildren(...views);
  }

  /** Show the text as Markdown. A text that was too slow once stays plain text. */
  showContent() {
    const shown = this.isPlain ? null : rendered(this.message.content);
    this.isPlain = shown === null;
    this.body.classList.toggle("plain", this.isPlain);
    this.body.replaceChildren(shown ?? this.message.content);
  }

  /** Show the progress of the prompt in tokens, or that the model is being loaded; null once there is text. */
  waiting(progress) {
    this.wait.hidden = progress === null;
    if (progress === null) return;
    const { computed, total, isLoading } = progress;
    const bar = el("progress", { "aria-label": isLoading ? "Model loaded" : "Prompt computed" });
    if (total) Object.assign(bar, { value: computed, max: total });
    const before = isLoading ? "loading the model" : "waiting for its turn";
    this.wait.replaceChildren(bar, total ? `computing the prompt: ${count(computed)} of ${count(total)} tokens` : before);
  }

  /** Show the colour of its request in the live view; null after the request has ended. */
  mark(colour) {
    this.dot.style.background = colour ?? "";
  }

  showCalls() {
    const { calls } = this.message;
    while (this.calls.children.length > calls.length) this.calls.lastChild.remove();
    calls.forEach((call, i) => {
      const part = this.calls.children[i] ?? this.calls.appendChild(this.callView(call));
      part.querySelector("summary").textContent = `Call of ${call.name}`;
      part.querySelector("code").textContent = call.text;
      part.querySelector("form").hidden = this.message.state === "running";
    });
  }

  callView(call) {
    const result = el("input", { type: "text", required: true, "aria-label": "Result of the call", placeholder: "Its result" });
    const form = el("form", {}, result, el("button", { type: "submit", textContent: "Send the result" }));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.actions.result(this.message, call, result.value);
    });
    const details = el("details", { className: "call", open: true }, el("summary"));
    details.append(el("pre", { tabIndex: 0 }, el("code")), form);
    return details;
  }

  showFoot() {
    const { message, actions } = this;
    const parts = [];
    const [at, number] = this.place;
    if (number > 1) {
      parts.push(
        el(
          "span",
          { className: "branches" },
          button("‹", "Branch before", () => actions.turn(message, -1), at === 0),
          `${at + 1} of ${number}`,
          button("›", "Branch after", () => actions.turn(message, 1), at === number - 1),
        ),
      );
    }
    if (message.role === "user") parts.push(button("Edit", "Edit and send again", () => this.edit()));
    if (message.role === "assistant" && message.state !== "running") {
      parts.push(button("Again", "Answer again", () => actions.again(message)));
      if (message.content) parts.push(copyButton(() => message.content, "this answer"));
    }
    if (message.figures) parts.push(el("span", { className: "figures", textContent: figuresText(message) }));
    if (message.reason === "length") parts.push("cut at the token limit");
    if (this.isPlain) parts.push("shown as plain text: its Markdown is too much to lay out");
    const ending = message.state === "failed" ? "problem" : "ending";
    if (message.problem) parts.push(el("span", { className: ending, textContent: message.problem }));
    this.foot.replaceChildren(...parts);
  }

  edit() {
    let images = this.message.images ?? [];
    const remove = (image) => {
      images = images.filter((one) => one !== image);
      this.showImages(images, remove);
    };
    this.showImages(images, remove);
    this.body.hidden = false;
    const area = el("textarea", { value: this.message.content, "aria-label": "Message" });
    const form = el("form", { className: "edit" }, area);
    const send = el("button", { type: "submit", className: "primary", textContent: "Send again" });
    const cancel = el("button", { type: "button", textContent: "Leave it" });
    form.append(el("div", { className: "bar" }, send, cancel));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (area.value.trim() || images.length) this.actions.edit(this.message, area.value, images);
    });
    cancel.addEventListener("click", () => {
      this.showImages(this.message.images ?? []);
      this.update();
    });
    this.body.replaceChildren(form);
    area.focus();
  }
}

function button(text, label, onclick, disabled = false) {
  const made = el("button", { type: "button", className: "plain", textContent: text, title: label, disabled });
  made.setAttribute("aria-label", label);
  made.addEventListener("click", onclick);
  return made;
}

function figuresText({ figures: { firstSeconds, perSecond, tokens, promptTokens, cachedTokens, imageTokens }, drafts }) {
  const parts = [`first token after ${duration(firstSeconds)}`];
  if (perSecond) parts.push(`${perSecond.toFixed(1)} tokens/s`);
  parts.push(`${count(tokens)} ${tokens === 1 ? "token" : "tokens"}`);
  parts.push(`${count(cachedTokens)} of ${count(promptTokens)} prompt tokens from the cache`);
  if (imageTokens) parts.push(`${count(imageTokens)} image tokens`);
  if (drafts) parts.push(`${count(drafts.accepted)} of ${count(drafts.proposed)} drafts accepted`);
  return parts.join(" · ");
}
