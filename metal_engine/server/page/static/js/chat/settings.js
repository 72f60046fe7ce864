// Settings of the chat: sampling, a system prompt, tools. Empty settings have the model's default.

import { byId, el } from "../dom.js";
import { loadSettings, saveSettings } from "./store.js";

const NUMBERS = [
  ["temperature", "Temperature", 0, 2, 0.05],
  ["top_p", "Top p", 0.01, 1, 0.01],
  ["top_k", "Top k", -1, 100000, 1],
  ["min_p", "Min p", 0, 1, 0.01],
  ["max_tokens", "Tokens at most", 1, 10000000, 1],
  ["seed", "Seed", 0, 4294967295, 1],
  ["presence_penalty", "Presence penalty", -2, 2, 0.1],
  ["repetition_penalty", "Repetition penalty", 0.1, 2, 0.05],
];
// Used if the model recommends no temperature: at the server's default of 1.0, small models produce nonsense.
const TEMPERATURE = 0.7;
const EFFORTS = ["", "none", "low", "medium", "high"];

export class Settings {
  constructor() {
    this.values = loadSettings();
    this.recommended = null; // recommended sampling parameters by name; null while no model is loaded
    this.inputs = {};
    const form = byId("settings");
    const change = (name, value) => {
      if (value === "") delete this.values[name];
      else this.values[name] = value;
      saveSettings(this.values);
      this.show();
    };
    const field = (name, title, input, className = "") => {
      input.value = this.values[name] ?? "";
      input.addEventListener("input", () => change(name, input.value));
      form.append(el("label", { className }, title, input));
      return input;
    };
    for (const [name, title, min, max, step] of NUMBERS) {
      this.inputs[name] = field(name, title, el("input", { type: "number", min, max, step, placeholder: "default" }));
    }
    const options = EFFORTS.map((one) => el("option", { value: one, textContent: one || "default" }));
    field("reasoning_effort", "Reasoning", el("select", {}, ...options));
    field("system", "System prompt", el("textarea", { rows: 2 }), "wide");
    this.tools = field("tools", "Tools, as OpenAI's JSON list", el("textarea", { rows: 2, spellcheck: false }), "wide");
    this.tools.addEventListener("input", () => this.tools.setCustomValidity(isList(this.tools.value) ? "" : "This is not a JSON list."));
    form.addEventListener("submit", (event) => event.preventDefault());
    this.show();
    const open = byId("settings-open");
    open.addEventListener("click", () => {
      form.hidden = !form.hidden;
      open.setAttribute("aria-expanded", String(!form.hidden));
    });
  }

  /** Set the recommended sampling of the selected model; null if no model is loaded. */
  follow(recommended) {
    this.recommended = recommended;
    this.show();
  }

  /** Return the page's own defaults: a temperature, if the model recommends none. */
  get own() {
    return this.recommended && this.recommended.temperature === undefined ? { temperature: TEMPERATURE } : {};
  }

  /** Show the sampling in effect below the message field, and as placeholders of empty settings. */
  show() {
    const groups = { yours: [], "the model's": [], "the page's": [] };
    for (const [name, title] of NUMBERS) {
      const given = this.recommended?.[name] ?? this.own[name];
      this.inputs[name].placeholder = given ?? "default";
      const whose = this.values[name] !== undefined ? "yours" : this.recommended?.[name] !== undefined ? "the model's" : "the page's";
      const value = this.values[name] ?? given;
      if (value !== undefined) groups[whose].push(`${title.toLowerCase()} ${value}`);
    }
    const said = Object.entries(groups).filter(([, parts]) => parts.length);
    const text = said.map(([whose, parts]) => `${parts.join(", ")} (${whose})`).join("; ");
    byId("sampling").textContent = text && `Sampling: ${text}`;
  }

  /** Return the request parameters for these settings. */
  get parameters() {
    const found = { ...this.own };
    for (const [name] of NUMBERS) if (this.values[name] !== undefined) found[name] = Number(this.values[name]);
    if (this.values.reasoning_effort) found.reasoning_effort = this.values.reasoning_effort;
    if (this.values.tools && isList(this.values.tools)) found.tools = JSON.parse(this.values.tools);
    return found;
  }

  /** Return the initial messages of every conversation. */
  get system() {
    return this.values.system ? [{ role: "system", content: this.values.system }] : [];
  }
}

function isList(text) {
  if (!text.trim()) return true;
  try {
    return Array.isArray(JSON.parse(text));
  } catch {
    return false;
  }
}
