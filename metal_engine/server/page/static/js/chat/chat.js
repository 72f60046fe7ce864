// The chat: the open conversation, its messages, and the answer in progress.

import { byId } from "../dom.js";
import { Answer } from "./answer.js";
import { Attachments } from "./attachments.js";
import { imagePart, storeImages } from "./images.js";
import { Library } from "./library.js";
import { MessageView } from "./message_view.js";
import { openConversation, saveConversation } from "./store.js";
import { suggestions } from "./suggestions.js";

const SAVE_SECONDS = 1;
// Minimum time between two layouts of an answer, as a multiple of the last layout's duration, so that long answers do not
// block the page.
const REST = 4;

export class Chat {
  /**
   * `live` has functions about the engine: request(serverId) returns the engine's request of an answer, colour(request) its
   * colour, model() the name of the answering model, and imageRefusal() the reason why it takes no images, or null.
   */
  constructor(settings, live) {
    this.settings = settings;
    this.live = live;
    this.answer = null; // answer in progress
    this.last = null; // latest answer
    this.views = new Map();
    this.list = byId("messages");
    this.prompt = byId("prompt");
    this.rest = 0; // milliseconds until the next layout
    this.attachments = new Attachments(live.imageRefusal);
    this.library = new Library(this);
    this.open(openConversation());
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.prompt.addEventListener("keydown", (event) => {
      // Safari ends the composition of a word before the event of its Enter key, which then has this code.
      const isComposing = event.isComposing || event.keyCode === 229;
      if (event.key !== "Enter" || event.shiftKey || isComposing) return;
      event.preventDefault();
      this.send();
    });
    this.prompt.addEventListener("input", () => this.fitPrompt());
    // The answer in progress is cut off. Opening the conversation again shows that.
    addEventListener("pagehide", () => (this.isLeaving = true));
    addEventListener("pageshow", () => (this.isLeaving = false));
    byId("stop").addEventListener("click", () => this.answer?.stop());
  }

  open(conversation) {
    this.answer?.stop();
    this.conversation = conversation;
    this.show();
    this.library.show();
  }

  save() {
    if (!saveConversation(this.conversation)) this.announce("This conversation is too long to be kept in the browser.");
  }

  // --- messages ---

  show() {
    const { path } = this.conversation;
    const actions = {
      edit: (message, text, images) => this.ask(this.conversation.parentOf(message), text, images),
      again: (message) => this.reply(this.conversation.parentOf(message)),
      turn: (message, by) => this.turn(message, by),
      result: (message, call, text) => this.sendResult(message, call, text),
    };
    this.views = new Map(
      path.map((message) => [message.id, new MessageView(message, this.conversation.place(message), actions)]),
    );
    const shown = [...this.views.values()].map((view) => view.element);
    this.list.replaceChildren(...(shown.length ? shown : [suggestions((text) => this.ask(null, text))]));
    this.list.scrollTop = this.list.scrollHeight;
  }

  turn(message, by) {
    this.answer?.stop();
    this.conversation.turn(message, by);
    this.save();
    this.show();
  }

  send() {
    const text = this.prompt.value;
    if (this.answer || !(text.trim() || this.attachments.images.length)) return;
    this.prompt.value = "";
    this.fitPrompt();
    const attached = this.attachments.take();
    storeImages(this.conversation.id, attached);
    const images = attached.map(({ id, name, file }) => ({ id, name, size: file.size }));
    this.ask(this.conversation.path.at(-1) ?? null, text, images);
  }

  ask(parent, content, images = []) {
    this.reply(this.conversation.add(parent, { role: "user", content, ...(images.length && { images }) }));
  }

  sendResult(message, call, content) {
    this.reply(this.conversation.add(message, { role: "tool", content, callId: call.id }));
  }

  // --- answers ---

  /** Request an answer to a message. */
  async reply(last) {
    this.answer?.stop();
    const { conversation } = this;
    const { system, parameters } = this.settings;
    const messages = async () => [...system, ...(await conversation.upTo(last, imagePart))];
    const empty = { role: "assistant", content: "", reasoning: "", calls: [], state: "running" };
    const message = conversation.add(last, { ...empty, model: this.live.model() });
    const answer = new Answer(message, conversation, (part) => this.changed(answer, part));
    this.answer = this.last = answer;
    this.show();
    this.library.show();
    this.save();
    this.views.get(message.id).waiting({});
    this.showSending();
    await answer.run(parameters, messages);
  }

  changed(answer, part) {
    const { conversation } = answer;
    const view = conversation === this.conversation ? this.views.get(answer.message.id) : undefined;
    if (part === "loading") view?.waiting({ isLoading: true });
    if (part === "text") {
      view?.waiting(null);
      this.drawSoon(view);
      this.saveSoon(conversation);
    }
    if (part === "end" && !this.isLeaving) {
      if (this.answer === answer) this.answer = null;
      view?.mark(null);
      if (view) this.draw(view);
      this.saveNow(conversation);
      this.showSending();
      this.announce(answer.message.problem ? `The answer ended: ${answer.message.problem}` : "The answer is complete.");
    }
  }

  /** Lay out Markdown at most once per frame of the screen, even if tokens arrive faster. */
  drawSoon(view) {
    if (!view || this.drawing) return;
    this.drawing = true;
    const draw = () => {
      this.drawing = false;
      const started = performance.now();
      this.draw(view);
      this.rest = REST * (performance.now() - started);
    };
    setTimeout(() => requestAnimationFrame(draw), this.rest);
  }

  draw(view) {
    const isAtEnd = this.list.scrollHeight - this.list.scrollTop - this.list.clientHeight < 60;
    view.update();
    if (isAtEnd) this.list.scrollTop = this.list.scrollHeight;
  }

  saveSoon(conversation) {
    this.saving ??= setTimeout(() => this.saveNow(conversation), 1000 * SAVE_SECONDS);
  }

  /** Save a conversation now, and not again later: the user may have opened it anew and renamed it by then. */
  saveNow(conversation) {
    clearTimeout(this.saving);
    this.saving = undefined;
    saveConversation(conversation);
  }

  /** Record and show the numbers of proposed and accepted drafts of a finished request. */
  drafted(request, proposed, accepted) {
    if (!this.last || this.live.request(this.last.serverId) !== request) return;
    const { message, conversation } = this.last;
    message.drafts = { proposed, accepted };
    if (conversation !== this.conversation) return; // it may have been opened anew and changed
    const view = this.views.get(message.id);
    if (view) this.draw(view);
    saveConversation(conversation);
  }

  /** Show the engine's state of the answer in progress. */
  follow() {
    if (!this.answer) return;
    const view = this.views.get(this.answer.message.id);
    const request = this.live.request(this.answer.serverId);
    if (!view || !request) return;
    view.mark(this.live.colour(request));
    const { content, reasoning, calls } = this.answer.message;
    if (content || reasoning || calls.length) return;
    view.waiting({ computed: Math.min(request.computed, request.prompt_tokens), total: request.prompt_tokens });
  }

  showSending() {
    byId("stop").hidden = !this.answer;
    byId("send").hidden = Boolean(this.answer);
  }

  fitPrompt() {
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${this.prompt.scrollHeight + 2}px`;
  }

  announce(text) {
    byId("announcer").textContent = text;
  }
}
