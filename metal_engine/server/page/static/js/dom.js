// Creates elements, and finds elements of the page.

export const byId = (id) => document.getElementById(id);

/** Create an element with properties, `dataset`, `aria-*` and children. Strings become text, never HTML. */
export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name === "dataset") Object.assign(made.dataset, value);
    else if (name.startsWith("aria-") || name === "role" || name === "for") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** Create a button that copies a text and confirms it. */
export function copyButton(text, what) {
  const button = el("button", { type: "button", className: "copy", textContent: "Copy", "aria-label": `Copy ${what}` });
  button.addEventListener("click", async () => {
    button.textContent = (await copy(text())) ? "Copied" : "Press Ctrl+C";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text); // not available without TLS, except on localhost
    return true;
  } catch {
    const area = el("textarea", { value: text, className: "hidden" });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

/** Format a size in bytes. */
export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; bytes >= 1024 && unit < units.length - 1; unit += 1) bytes /= 1024;
  return `${bytes >= 100 || unit === 0 ? Math.round(bytes) : bytes.toFixed(1)} ${units[unit]}`;
}

/** Format a duration in seconds. */
export function duration(seconds) {
  if (seconds >= 100) return `${Math.round(seconds)} s`;
  if (seconds >= 1) return `${seconds.toFixed(1)} s`;
  return seconds >= 0.01 ? `${Math.round(1000 * seconds)} ms` : `${(1000 * seconds).toFixed(1)} ms`;
}

export const count = (number) => number.toLocaleString("en-US");
