// A canvas with the screen's resolution that draws at most once per frame and supports pointing at items.

import { onThemeChange } from "./colours.js";

export class View {
  /** `draw(context, width, height)` paints the complete canvas, in CSS pixels. */
  constructor(canvas, draw) {
    this.canvas = canvas;
    this.draw = draw;
    this.requested = false;
    this.redraw = this.redraw.bind(this);
    new ResizeObserver(this.redraw).observe(canvas);
    onThemeChange(this.redraw);
  }

  /** Draw in the next frame. */
  redraw() {
    if (this.requested) return;
    this.requested = true;
    requestAnimationFrame(() => {
      this.requested = false;
      this.paint();
    });
  }

  paint() {
    const { canvas } = this;
    const { clientWidth: width, clientHeight: height } = canvas;
    if (!width || !height) return;
    const scale = devicePixelRatio;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
    }
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    this.draw(context, width, height);
  }
}

/**
 * Describe the item under the mouse, or selected with the arrow keys, in `readout`.
 *
 * `hit(x, y)` returns an item, `step(item, dx, dy)` its neighbour (item may be null), and `describe(item)` a text.
 * `show(item)` marks the item. Returns a function that ends the description, for items that no longer exist.
 */
export function inspect(view, readout, { hit, step, describe, show }) {
  let item = null;
  const idle = readout.textContent;
  const set = (found) => {
    item = found;
    show(item);
    readout.textContent = item === null ? idle : describe(item);
  };
  view.addEventListener("pointermove", (event) => {
    const box = view.getBoundingClientRect();
    set(hit(event.clientX - box.left, event.clientY - box.top));
  });
  view.addEventListener("pointerleave", () => set(null));
  view.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.key === "Escape") set(null);
    if (!moves[event.key]) return;
    event.preventDefault();
    set(step(item, ...moves[event.key]));
  });
  return () => set(null);
}
