// Markdown of a model's to elements. It is text by a stranger: HTML in it stays text, only what is listed here survives,
// and nothing is loaded.

import { copyButton, el } from "../dom.js";
import DOMPurify from "../../vendor/purify.es.mjs";
import { marked } from "../../vendor/marked.esm.js";

const TAGS = [
  "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
  "strong", "sub", "sup", "table", "tbody", "td", "th", "thead", "tr", "ul",
];
const SANITISED = {
  ALLOWED_TAGS: TAGS,
  ALLOWED_ATTR: ["href", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const escaped = (text) => text.replace(/[&<>]/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[sign]);

// Images become links: to load one would tell its server what the model wrote into the address.
marked.use({
  gfm: true,
  breaks: false,
  renderer: {
    html({ text }) {
      return /^<br\s*\/?>$/i.test(text) ? "<br>" : escaped(text); // line breaks are common in tables
    },
    image({ href, text }) {
      const link = document.createElement("a");
      link.setAttribute("href", href);
      link.textContent = text || href;
      return link.outerHTML;
    },
  },
});

/** The elements of a text in Markdown. */
export function rendered(text) {
  const fragment = DOMPurify.sanitize(marked.parse(text), SANITISED);
  for (const link of fragment.querySelectorAll("a[href]")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const block of fragment.querySelectorAll("pre")) {
    block.tabIndex = 0; // so that the keyboard can scroll it
    const frame = el("div", { className: "code" });
    block.replaceWith(frame);
    frame.append(block, copyButton(() => block.textContent, "this code"));
  }
  for (const table of fragment.querySelectorAll("table")) table.tabIndex = 0;
  return fragment;
}
