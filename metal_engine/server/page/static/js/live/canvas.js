// A canvas that is as sharp as the screen, draws once for each of the screen's frames, and can be pointed at.

import { onThemeChange } from "./colours.js";

export class View {
  /** `draw(context, width, height)` paints all of it, in CSS pixels. */
  constructor(canvas, draw) {
    this.canvas = canvas;
    this.draw = draw;
    this.requested = false;
    this.redraw = this.redraw.bind(this);
    new ResizeObserver(this.redraw).observe(canvas);
    onThemeChange(this.redraw);
  }

  /** Draw with the screen's next frame. */
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
 * Says what the mouse points at, or what the arrow keys have gone to, in `readout`.
 *
 * `hit(x, y)` finds an item, `step(item, dx, dy)` the one beside it (item may be null), `describe(item)` is a text and
 * `show(item)` marks it. Returns what ends that, for items that are gone.
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
