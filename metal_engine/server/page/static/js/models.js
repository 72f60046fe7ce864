// Several models in one server: which are loaded, and which one the page talks to and looks at.

import { request, useModel } from "./api.js";
import { byId, el, size } from "./dom.js";
import { withKey } from "./key.js";

const SECONDS = 3;

export class Models {
  /** `changed()` is called when another model is picked. */
  constructor(changed) {
    this.changed = changed;
    this.cards = [];
    this.picked = null; // the server's only model
    this.waiting = [];
    // Resolves when the server has said for the first time which models it has.
    this.known = new Promise((resolve) => (this.isKnown = resolve));
    this.select = byId("model-pick");
    this.select.addEventListener("change", () => this.pick(this.select.value));
  }

  /** Ask for the models once, and again and again if there are several. */
  async run() {
    while (true) {
      if (!document.hidden) {
        try {
          const { data } = await (await withKey(() => request("/v1/models"))).json();
          if (!data.some((card) => card.state)) return; // a server of one model, which is always loaded
          this.show(data);
        } catch {
          // the live view says that the server does not answer
        }
        this.isKnown();
      }
      await new Promise((resolve) => setTimeout(resolve, 1000 * SECONDS));
    }
  }

  show(cards) {
    this.cards = cards;
    byId("models").hidden = false;
    while (this.select.options.length < cards.length) this.select.append(el("option"));
    cards.forEach((card, i) => {
      const option = this.select.options[i];
      option.value = card.id;
      option.textContent = card.loaded && card.state === "loaded" ? `${card.id} (loaded)` : `${card.id} (${card.state})`;
    });
    const loaded = cards.filter((card) => card.loaded);
    const taken = loaded.reduce((sum, card) => sum + card.memory_bytes, 0);
    byId("models-text").textContent = `${loaded.length} of ${cards.length} loaded, ${size(taken)}`;
    if (this.picked === null) this.pick((loaded[0] ?? cards[0]).id);
    if (this.isLoaded) for (const resolve of this.waiting.splice(0)) resolve();
  }

  pick(name) {
    this.picked = name;
    this.select.value = name;
    useModel(name);
    this.changed();
    if (this.isLoaded) for (const resolve of this.waiting.splice(0)) resolve();
  }

  /** Whether there is something to look at. */
  get isLoaded() {
    return this.picked === null || this.cards.some((card) => card.id === this.picked && card.loaded);
  }

  /** Resolves when the model is loaded that is looked at; to look at it loads nothing. */
  async loaded() {
    if (!this.isLoaded) await new Promise((resolve) => this.waiting.push(resolve));
  }
}
