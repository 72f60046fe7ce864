// Several models in one server: which are loaded, and which one the page talks to and looks at. Or one with adapters, which
// share its engine: which one the page talks to.

import { request, useModel } from "./api.js";
import { byId, el, size } from "./dom.js";
import { withKey } from "./key.js";

const SECONDS = 3;
const WAITING_SECONDS = 1; // when the model that is looked at is not loaded

export class Models {
  /** `changed()` is called when another model is picked. */
  constructor(changed) {
    this.changed = changed;
    this.cards = [];
    this.picked = null; // the server's only model
    this.isSeveral = false;
    this.waiting = [];
    // Resolves when the server has said for the first time which models it has.
    this.known = new Promise((resolve) => (this.isKnown = resolve));
    this.select = byId("model-pick");
    this.select.addEventListener("change", () => this.pick(this.select.value));
  }

  /** Ask for the models again and again if there are several; of one, whenever somebody comes to the page. */
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
      // the live view says that the server does not answer
    }
    this.isKnown();
  }

  show(cards, wasSeveral) {
    this.cards = cards;
    this.list((card) => (card.loaded && card.state === "loaded" ? "loaded" : card.state));
    const loaded = cards.filter((card) => card.loaded);
    const taken = loaded.reduce((sum, card) => sum + card.memory_bytes, 0);
    byId("models-text").textContent = `${loaded.length} of ${cards.length} loaded, ${size(taken)}`;
    // Of a server that has started anew, the models may be others, or have been one.
    const isThere = cards.some((card) => card.id === this.picked);
    if (!wasSeveral || !isThere) this.pick(isThere ? this.picked : (loaded[0] ?? cards[0]).id);
    if (this.isLoaded) for (const resolve of this.waiting.splice(0)) resolve();
  }

  /** A server's only model, which is always loaded, with the adapters that it has now; `wasSeveral` before a restart. */
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

  /** The models to choose from, each with what `about(card)` says of it. */
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
    if (!this.isSeveral) return; // adapters are looked at with their model
    this.changed();
    if (this.isLoaded) for (const resolve of this.waiting.splice(0)) resolve();
  }

  /** Whether there is something to look at. */
  get isLoaded() {
    return !this.isSeveral || this.cards.some((card) => card.id === this.picked && card.loaded);
  }

  /** Resolves when the model is loaded that is looked at; to look at it loads nothing. */
  async loaded() {
    if (!this.isLoaded) await new Promise((resolve) => this.waiting.push(resolve));
  }
}
