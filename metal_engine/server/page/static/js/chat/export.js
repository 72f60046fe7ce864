// Exports a conversation as a file.

import { el } from "../dom.js";

const NAMES = { user: "You", assistant: "Model", tool: "Tool" };

/** Return the shown branch of a conversation as Markdown. */
export function toMarkdown(conversation) {
  const parts = [`# ${conversation.title}`];
  for (const { role, model, content, images = [], calls = [] } of conversation.path) {
    parts.push(`## ${model ?? NAMES[role]}`, ...images.map(({ name }) => `Image: ${name}`), content);
    for (const { name, text } of calls) parts.push(`Call of ${name}:\n\n    ${text.replaceAll("\n", "\n    ")}`);
  }
  return `${parts.filter(Boolean).join("\n\n")}\n`;
}

/** Save a text as a file in the browser. Characters that file systems reject become spaces in its name. */
export function download(name, text) {
  const address = URL.createObjectURL(new Blob([text], { type: "text/markdown" }));
  const link = el("a", { href: address, download: name.replace(/[\s\\/:*?"<>|\p{C}]+/gu, " ").trim() });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
