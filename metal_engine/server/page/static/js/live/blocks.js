// The KV cache as a grid: a cell for each block, or for some that follow on one another where there are too many.

import { count } from "../dom.js";
import { inspect, View } from "./canvas.js";
import { colour, styled } from "./colours.js";

const LARGEST = 22;
const SMALLEST = 5;
const FLASH_SECONDS = 0.7;

export class Blocks {
  constructor(view, readout, summary, pool) {
    this.pool = pool;
    this.summary = summary;
    this.chosen = null;
    this.flashes = new Map(); // block -> when it stops
    this.view = new View(view.querySelector("canvas"), (...place) => this.draw(...place));
    inspect(view, readout, {
      hit: (x, y) => this.hit(x, y),
      step: (cell, dx, dy) => this.beside(cell, dx, dy),
      describe: (cell) => this.describe(cell),
      show: (cell) => {
        this.chosen = cell;
        this.view.redraw();
      },
    });
  }

  /** Draw what has changed; blocks that preempted requests have lost flash. */
  update(lost) {
    const until = performance.now() + 1000 * FLASH_SECONDS;
    for (const block of lost) this.flashes.set(block, until);
    if (lost.length) setTimeout(() => this.view.redraw(), 1000 * FLASH_SECONDS + 20);
    const { numBlocks, numUsed, numCached, blockSize } = this.pool;
    this.summary.textContent =
      `${count(numBlocks)} blocks of ${blockSize} tokens: ${count(numUsed)} in use, ` +
      `${count(numCached)} cached, ${count(numBlocks - numUsed - numCached)} free`;
    this.view.redraw();
  }

  /** How blocks are laid out: cells of `size` pixels, `columns` in a row, `each` blocks in one. */
  layout(width, height) {
    const { numBlocks } = this.pool;
    for (let size = LARGEST; size >= SMALLEST; size -= 1) {
      const columns = Math.floor(width / size);
      if (columns * Math.floor(height / size) >= numBlocks) return { size, columns, each: 1 };
    }
    const columns = Math.max(Math.floor(width / SMALLEST), 1);
    const cells = Math.max(columns * Math.floor(height / SMALLEST), 1);
    return { size: SMALLEST, columns, each: Math.ceil(numBlocks / cells) };
  }

  draw(context, width, height) {
    const { size, columns, each } = (this.grid = this.layout(width, height));
    const now = performance.now();
    const line = styled("--line");
    const text = styled("--text");
    for (let cell = 0; cell * each < this.pool.numBlocks; cell += 1) {
      const [x, y] = [(cell % columns) * size, Math.floor(cell / columns) * size];
      this.drawCell(context, cell * each, each, x, y, size - 1, line, now);
      if (cell === this.chosen) {
        context.strokeStyle = text;
        context.lineWidth = 1.5;
        context.strokeRect(x - 0.5, y - 0.5, size, size);
      }
    }
    for (const [block, until] of this.flashes) if (until <= now) this.flashes.delete(block);
  }

  drawCell(context, first, each, x, y, side, line, now) {
    const last = Math.min(first + each, this.pool.numBlocks);
    let block = first;
    while (block < last - 1 && !this.pool.owners[block]) block += 1; // show one that is in use, if there is one
    const owners = this.pool.owners[block];
    if ((this.flashes.get(block) ?? 0) > now) {
      context.fillStyle = styled("--problem");
      context.fillRect(x, y, side, side);
    } else if (owners) {
      context.fillStyle = colour(owners[0]);
      context.fillRect(x, y, side, side);
      if (owners.length > 1) this.drawStripes(context, x, y, side, colour(owners.at(-1)));
    } else if (this.pool.cached[block]) {
      context.globalAlpha = 0.35;
      context.fillStyle = this.pool.lastOwner[block] < 0 ? styled("--quiet") : colour(this.pool.lastOwner[block]);
      context.fillRect(x, y, side, side);
      context.globalAlpha = 1;
    } else {
      context.fillStyle = line;
      context.globalAlpha = 0.55;
      context.fillRect(x, y, side, side);
      context.globalAlpha = 1;
    }
  }

  drawStripes(context, x, y, side, other) {
    context.fillStyle = other;
    context.beginPath();
    context.moveTo(x, y + side);
    context.lineTo(x + side, y);
    context.lineTo(x + side, y + side);
    context.fill();
    context.strokeStyle = styled("--panel");
    context.lineWidth = 1.5;
    context.beginPath();
    context.moveTo(x, y + side);
    context.lineTo(x + side, y);
    context.stroke();
  }

  hit(x, y) {
    if (!this.grid) return null;
    const { size, columns, each } = this.grid;
    const column = Math.floor(x / size);
    const cell = Math.floor(y / size) * columns + column;
    return column < columns && cell * each < this.pool.numBlocks ? cell : null;
  }

  beside(cell, dx, dy) {
    if (!this.grid) return null;
    if (cell === null) return 0;
    const { columns, each } = this.grid;
    const last = Math.ceil(this.pool.numBlocks / each) - 1;
    return Math.min(Math.max(cell + dx + dy * columns, 0), last);
  }

  describe(cell) {
    const { each } = this.grid;
    const first = cell * each;
    if (each > 1) {
      const blocks = Array.from({ length: Math.min(each, this.pool.numBlocks - first) }, (_, i) => first + i);
      const used = blocks.filter((block) => this.pool.owners[block]).length;
      return `blocks ${count(first)} to ${count(first + blocks.length - 1)}: ${used} in use`;
    }
    const owners = this.pool.owners[first];
    const cached = this.pool.cached[first] ? "holds a cached prefix" : "";
    if (!owners) return `block ${count(first)}: ${cached ? `not in use, ${cached}` : "free"}`;
    const names = owners.slice(0, 4).map((key) => `…${this.pool.requests.get(key)?.id ?? key}`);
    const more = owners.length > names.length ? ` and ${owners.length - names.length} more` : "";
    return `block ${count(first)}: ${names.join(", ")}${more}; ${owners.length} references${cached && `, ${cached}`}`;
  }
}
