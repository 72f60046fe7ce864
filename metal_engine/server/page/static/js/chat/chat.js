// The chat: which conversation is open, its messages, and answers on their way.

import { byId, el } from "../dom.js";
import { Answer } from "./answer.js";
import { MessageView } from "./message_view.js";
import { deleteConversation, listConversations, openConversation, saveConversation } from "./store.js";

const SAVE_SECONDS = 1;

export class Chat {
  /** `live` finds an answer's request in the engine: progress(serverId), and colour(serverId). */
  constructor(settings, live) {
    this.settings = settings;
    this.live = live;
    this.answer = null; // the one that is on its way
    this.last = null; // the one that began last
    this.views = new Map();
    this.list = byId("messages");
    this.prompt = byId("prompt");
    this.open(openConversation());
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    this.prompt.addEventListener("input", () => this.fitPrompt());
    // What is under way is cut then, and is told so by the next one who opens it.
    addEventListener("pagehide", () => (this.isLeaving = true));
    addEventListener("pageshow", () => (this.isLeaving = false));
    byId("stop").addEventListener("click", () => this.answer?.stop());
    byId("conversation-new").addEventListener("click", () => this.open(openConversation(null)));
    byId("conversation-delete").addEventListener("click", () => this.delete());
    byId("conversations").addEventListener("change", (event) => this.open(openConversation(event.target.value)));
  }

  // --- conversations ---

  open(conversation) {
    this.answer?.stop();
    this.conversation = conversation;
    this.show();
    this.showList();
  }

  delete() {
    if (!this.conversation.isEmpty && !confirm("Delete this conversation?")) return;
    this.answer?.stop();
    deleteConversation(this.conversation.id);
    this.open(openConversation(listConversations()[0]?.id ?? null));
  }

  save() {
    if (!saveConversation(this.conversation)) this.announce("This conversation is too long to be kept in the browser.");
  }

  showList() {
    const listed = listConversations();
    if (!listed.some((one) => one.id === this.conversation.id)) listed.unshift(this.conversation);
    const options = listed.map((one) => el("option", { value: one.id, textContent: one.title }));
    byId("conversations").replaceChildren(...options);
    byId("conversations").value = this.conversation.id;
  }

  // --- messages ---

  show() {
    const { path } = this.conversation;
    const actions = {
      edit: (message, text) => this.ask(this.conversation.parentOf(message), text),
      again: (message) => this.reply(this.conversation.parentOf(message)),
      turn: (message, by) => this.turn(message, by),
      result: (message, call, text) => this.sendResult(message, call, text),
    };
    this.views = new Map(
      path.map((message) => [message.id, new MessageView(message, this.conversation.place(message), actions)]),
    );
    const shown = [...this.views.values()].map((view) => view.element);
    this.list.replaceChildren(...(shown.length ? shown : [el("p", { className: "empty", textContent: "Nothing has been said yet." })]));
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
    if (!text.trim() || this.answer) return;
    this.prompt.value = "";
    this.fitPrompt();
    this.ask(this.conversation.path.at(-1) ?? null, text);
  }

  ask(parent, content) {
    this.reply(this.conversation.add(parent, { role: "user", content }));
  }

  sendResult(message, call, content) {
    this.reply(this.conversation.add(message, { role: "tool", content, callId: call.id }));
  }

  // --- answers ---

  /** Have the model answer a message. */
  async reply(last) {
    this.answer?.stop();
    const { conversation } = this;
    const body = { messages: [...this.settings.system, ...conversation.upTo(last)], ...this.settings.parameters };
    const message = conversation.add(last, { role: "assistant", content: "", reasoning: "", calls: [], state: "running" });
    const answer = new Answer(message, conversation, (part) => this.changed(answer, part));
    this.answer = this.last = answer;
    this.show();
    this.showList();
    this.save();
    this.views.get(message.id).waiting({});
    this.showSending();
    await answer.run(body);
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
      saveConversation(conversation);
      this.showSending();
      this.announce(answer.message.problem ? `The answer ended: ${answer.message.problem}` : "The answer is complete.");
    }
  }

  /** Markdown is laid out once for each of the screen's frames, however fast tokens come. */
  drawSoon(view) {
    if (!view || this.drawing) return;
    this.drawing = true;
    requestAnimationFrame(() => {
      this.drawing = false;
      this.draw(view);
    });
  }

  draw(view) {
    const isAtEnd = this.list.scrollHeight - this.list.scrollTop - this.list.clientHeight < 60;
    view.update();
    if (isAtEnd) this.list.scrollTop = this.list.scrollHeight;
  }

  saveSoon(conversation) {
    this.saving ??= setTimeout(() => {
      this.saving = undefined;
      saveConversation(conversation);
    }, 1000 * SAVE_SECONDS);
  }

  /** A request has ended, and so many tokens of it were drafts: this is told about when its answer ends. */
  drafted(request, proposed, accepted) {
    if (!this.last || this.live.request(this.last.serverId) !== request) return;
    const { message, conversation } = this.last;
    message.drafts = { proposed, accepted };
    const view = conversation === this.conversation ? this.views.get(message.id) : undefined;
    if (view) this.draw(view);
    saveConversation(conversation);
  }

  /** What the engine says of the answer on its way. */
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
