// Suggested first messages of an empty conversation.

import { el } from "../dom.js";

const SUGGESTIONS = [
  "What is the capital of France?",
  "Why is the sky blue?",
  "Write a Python function that adds two numbers.",
  "Give me three tips for sleeping well.",
];

/** Create an element with a button for each suggestion, which calls `send(text)`. */
export function suggestions(send) {
  const buttons = SUGGESTIONS.map((text) => {
    const button = el("button", { type: "button", textContent: text });
    button.addEventListener("click", () => send(text));
    return button;
  });
  return el("div", { className: "empty" }, el("p", { textContent: "Nothing has been said yet. Try one of these:" }), ...buttons);
}
