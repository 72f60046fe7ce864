// What an empty conversation offers: messages to begin with.

import { el } from "../dom.js";

const SUGGESTIONS = [
  "What is the capital of France?",
  "Why is the sky blue?",
  "Write a Python function that adds two numbers.",
  "Give me three tips for sleeping well.",
];

/** An element with a button for each suggestion; `send(text)` is called for the one that is picked. */
export function suggestions(send) {
  const buttons = SUGGESTIONS.map((text) => {
    const button = el("button", { type: "button", textContent: text });
    button.addEventListener("click", () => send(text));
    return button;
  });
  return el("div", { className: "empty" }, el("p", { textContent: "Nothing has been said yet. Try one of these:" }), ...buttons);
}
