// Memory of the engine, and the slots of recurrent states.

import { byId, count, el, size } from "../dom.js";

const PARTS = [
  ["weights", "weights", "#5b5b66"],
  ["adapters", "adapters", "#00855f"],
  ["kv_cache", "KV cache", "#0072b2"],
  ["states", "recurrent states", "#a8507f"],
  ["step", "largest step", "#d55e00"],
];

export function showMemory({ memory, device }) {
  const parts = PARTS.filter(([name]) => memory[name] > 0);
  const taken = parts.reduce((sum, [name]) => sum + memory[name], 0);
  const bar = byId("memory-bar");
  bar.replaceChildren();
  for (const [name, title, background] of parts) {
    const part = el("div", { title: `${title}: ${size(memory[name])}` });
    part.style.flexGrow = memory[name];
    part.style.background = background;
    bar.append(part);
  }
  const rest = el("div");
  rest.style.flexGrow = Math.max(memory.device - taken, 0);
  bar.append(rest);
  const said = parts.map(([name, title]) => `${title} ${size(memory[name])}`).join(", ");
  byId("memory-text").textContent = `${said}; ${size(taken)} at most of ${size(memory.device)} on ${device.name}`;
  byId("memory").hidden = false;
}

/** Show the slots of recurrent states: of running requests, of state checkpoints, and free slots. */
export function showStates(numSlots, stats) {
  byId("states").hidden = !numSlots;
  if (!numSlots) return;
  const running = Math.min(stats.running, numSlots);
  const checkpoints = Math.min(stats.checkpoints, numSlots - running);
  byId("states-text").textContent =
    `Recurrent states: ${count(numSlots)} slots, ${running} of running requests, ${checkpoints} checkpoints`;
  const bar = byId("states-bar");
  const shown = Math.min(numSlots, 256);
  while (bar.children.length < shown) bar.append(el("i"));
  while (bar.children.length > shown) bar.lastChild.remove();
  [...bar.children].forEach((dot, i) => {
    dot.className = i < running ? "running" : i < running + checkpoints ? "checkpoint" : "";
  });
}
