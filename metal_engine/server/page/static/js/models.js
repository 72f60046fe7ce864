// Selection of a model. With several models, it is for the chat and the live view. With one model and its adapters, which
// share the model's engine, it is for the chat only.

import { request, useModel } from "./api.js";
import { byId, el, size } from "./dom.js";
import { withKey } from "./key.js";

const SECONDS = 3;
const WAITING_SECONDS = 1; // while the watched model is not loaded

export class Models {
  /** Calls `changed()` when another model is selected. */
  constructor(changed) {
    this.changed = changed;
    this.cards = [];
    this.picked = null; // null: the server's only model
    this.isSeveral = false;
    this.waiting = [];
    // Resolves after the first list of models from the server.
    this.known = new Promise((resolve) => (this.isKnown = resolve));
    this.select = byId("model-pick");
    this.select.addEventListener("change", () => this.pick(this.select.value));
  }

  /** Update the list periodically if there are several models; otherwise, whenever the page gets the focus. */
  async run() {
    addEventListener("focus", () => this.ask());
    this.select.addEventListener("focus", () => this.ask());
    while (true) {
      if (!document.hidden && (this.isSeveral || !this.cards.length)) await this.ask();
      const seconds = this.isLoaded ? SECONDS : WAITING_SECONDS;
      await new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
    }
  }

  async ask() {
    try {
      const { data } = await (await withKey(() => request("/v1/models"))).json();
      const wasSeveral = this.isSeveral;
      this.isSeveral = data.some((card) => card.state);
      if (this.isSeveral) this.show(data, wasSeveral);
      else this.showAdapters(data, wasSeveral);
    } catch {
      // the live view reports that the server does not respond
    }
    this.isKnown();
  }

  show(cards, wasSeveral) {
    this.cards = cards;
    this.list((card) => (card.loaded && card.state === "loaded" ? "loaded" : card.state));
    const loaded = cards.filter((card) => card.loaded);
    const taken = loaded.reduce((sum, card) => sum + card.memory_bytes, 0);
    byId("models-text").textContent = `${loaded.length} of ${cards.length} loaded, ${size(taken)}`;
    // A restarted server may have other models, or may have had only one before.
    const isThere = cards.some((card) => card.id === this.picked);
    if (!wasSeveral || !isThere) this.pick(isThere ? this.picked : (loaded[0] ?? cards[0]).id);
    if (this.isLoaded) for (const resolve of this.waiting.splice(0)) resolve();
  }

  /** Show a server's only model with its current adapters. `wasSeveral` is true if it had several models before a restart. */
  showAdapters(cards, wasSeveral) {
    this.cards = cards;
    const adapters = cards.filter((card) => card.parent);
    if (!adapters.length && this.picked === null) return;
    this.list((card) => (card.parent ? "adapter" : "model"));
    byId("models").hidden = !adapters.length;
    byId("models-text").textContent = adapters.length === 1 ? "with 1 adapter" : `with ${adapters.length} adapters`;
    const isThere = cards.some((card) => card.id === this.picked);
    if (wasSeveral || !isThere) this.pick(isThere ? this.picked : cards[0].id);
    for (const resolve of this.waiting.splice(0)) resolve();
  }

  /** Show the list of models, each with the text of `about(card)`. */
  list(about) {
    byId("models").hidden = false;
    while (this.select.options.length > this.cards.length) this.select.lastChild.remove();
    while (this.select.options.length < this.cards.length) this.select.append(el("option"));
    this.cards.forEach((card, i) => {
      const option = this.select.options[i];
      option.value = card.id;
      option.textContent = `${card.id} (${about(card)})`;
    });
    if (this.picked !== null) this.select.value = this.picked;
  }

  pick(name) {
    this.picked = name;
    this.select.value = name;
    useModel(name, this.isSeveral);
    if (!this.isSeveral) return; // the live view shows adapters with their model
    this.changed();
    if (this.isLoaded) for (const resolve of this.waiting.splice(0)) resolve();
  }

  /** Return true if the watched model is loaded. */
  get isLoaded() {
    return !this.isSeveral || this.cards.some((card) => card.id === this.picked && card.loaded);
  }

  /** Resolves when the watched model is loaded. Watching does not load a model. */
  async loaded() {
    if (!this.isLoaded) await new Promise((resolve) => this.waiting.push(resolve));
  }
}
