// Converts a model's Markdown to elements. The text is untrusted: HTML in it stays text, only the tags listed here survive,
// and nothing is loaded. Length and time have limits, because the library "marked" takes quadratic time for some texts or
// overflows its stack.

import { copyButton, el } from "../dom.js";
import DOMPurify from "../../vendor/purify.es.mjs";
import { marked, Tokenizer } from "../../vendor/marked.esm.js";

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

// A call of one of marked's tokenizers cannot be interrupted. At this length the slowest call takes less than a second.
const MAX_CHARACTERS = 64_000;
const MAX_SECONDS = 0.5;
const MAX_DEPTH = 100; // of quotes and lists within one another
// Link definitions and the padding of tables make the HTML longer than its text.
const MAX_HTML_CHARACTERS = 1_000_000;
const MAX_CELLS = 20_000;
// The tokenizers of marked. Each runs a number of times that grows with the text, so all of them check the time.
const TOKENIZERS = [
  "space", "code", "fences", "heading", "hr", "html", "def", "lheading", "paragraph", "text", "escape",
  "tag", "link", "reflink", "emStrong", "codespan", "br", "del", "autolink", "url", "inlineText",
];

let deadline = Infinity;
let depth = 0;

/** Throw if the time for the current text has passed. Returning false makes marked call its own function. */
function checkTime() {
  if (performance.now() > deadline) throw new Error("this Markdown takes too long");
  return false;
}

/** Return marked's tokenizer of this name with a limit on how deep it calls itself. */
function nested(name) {
  const tokenize = Tokenizer.prototype[name];
  return function (...args) {
    checkTime();
    if (depth >= MAX_DEPTH) throw new Error("this Markdown is too deep");
    depth += 1;
    try {
      return tokenize.apply(this, args);
    } finally {
      depth -= 1;
    }
  };
}

/** Return undefined, which means "not a table", for a table of too many cells, because marked fills up every row. */
function checkTable(source) {
  checkTime();
  const columns = source.split("\n", 1)[0].split("|").length;
  if (columns < 2) return false;
  const end = source.search(/\n[ \t]*\n/);
  const rows = (end < 0 ? source : source.slice(0, end)).split("\n").length;
  return columns * rows > MAX_CELLS ? undefined : false;
}

const escaped = (text) => text.replace(/[&<>]/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[sign]);

// Images become links: to load one would tell its server what the model wrote into the address.
marked.use({
  gfm: true,
  breaks: false,
  tokenizer: {
    ...Object.fromEntries(TOKENIZERS.map((name) => [name, checkTime])),
    blockquote: nested("blockquote"),
    list: nested("list"),
    table: checkTable,
  },
  renderer: {
    link: checkTime,
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

/** Return the elements of a text in Markdown; null if it is too long, too deep or too slow, and must be shown as it is. */
export function rendered(text) {
  if (text.length > MAX_CHARACTERS) return null;
  deadline = performance.now() + 1000 * MAX_SECONDS;
  try {
    const html = marked.parse(text);
    return html.length > MAX_HTML_CHARACTERS ? null : elementsOf(html);
  } catch {
    return null; // the stack is full, or the time is up
  }
}

function elementsOf(html) {
  const fragment = DOMPurify.sanitize(html, SANITISED);
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
