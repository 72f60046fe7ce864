// The KV cache as a grid with a cell for each block, or for several consecutive blocks if there are too many.

import { count } from "../dom.js";
import { inspect, View } from "./canvas.js";
import { colour, styled } from "./colours.js";

const LARGEST = 22;
const SMALLEST = 5;
const FLASH_SECONDS = 0.7;

const references = (number) => (number === 1 ? "1 reference" : `${count(number)} references`);

export class Blocks {
  constructor(view, readout, summary, pool) {
    this.pool = pool;
    this.summary = summary;
    this.chosen = null;
    this.flashes = new Map(); // block -> end time of its flash
    this.view = new View(view.querySelector("canvas"), (...place) => this.draw(...place));
    this.unmark = inspect(view, readout, {
      hit: (x, y) => this.hit(x, y),
      step: (cell, dx, dy) => this.beside(cell, dx, dy),
      describe: (cell) => this.describe(cell),
      show: (cell) => {
        this.chosen = cell;
        this.view.redraw();
      },
    });
  }

  /** Reset the grid after the pool was reset. */
  begin() {
    this.unmark();
    this.flashes.clear();
    this.update([]);
  }

  /** Draw changes. Blocks that preempted requests have lost flash. */
  update(lost) {
    const until = performance.now() + 1000 * FLASH_SECONDS;
    for (const block of lost) this.flashes.set(block, until);
    if (lost.length) setTimeout(() => this.view.redraw(), 1000 * FLASH_SECONDS + 20);
    const { numBlocks, numUsed, numCached, blockSize } = this.pool;
    const counts = `${count(numUsed)} in use, ${count(numCached)} cached, ${count(numBlocks - numUsed - numCached)} free`;
    this.summary.textContent = numBlocks ? `${count(numBlocks)} blocks of ${blockSize} tokens: ${counts}` : "";
    this.view.redraw();
  }

  /** Compute the layout: cells of `size` pixels, `columns` cells in a row, `each` blocks in a cell. */
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
      this.drawCell(context, this.shownOf(cell, each, now), x, y, size - 1, line, now);
      if (cell === this.chosen) {
        context.strokeStyle = text;
        context.lineWidth = 1.5;
        context.strokeRect(x - 0.5, y - 0.5, size, size);
      }
    }
    for (const [block, until] of this.flashes) if (until <= now) this.flashes.delete(block);
  }

  /** Return the blocks of a cell. */
  blocksOf(cell, each) {
    const first = cell * each;
    return Array.from({ length: Math.min(each, this.pool.numBlocks - first) }, (_, i) => first + i);
  }

  /** Return the block that represents a cell: a flashing, shared, used or cached block, in this order of preference. */
  shownOf(cell, each, now) {
    if (each === 1) return cell;
    const { owners, cached } = this.pool;
    const worth = (block) => {
      if ((this.flashes.get(block) ?? 0) > now) return 4;
      return owners[block] ? (owners[block].length > 1 ? 3 : 2) : cached[block];
    };
    return this.blocksOf(cell, each).reduce((best, block) => (worth(block) > worth(best) ? block : best));
  }

  drawCell(context, block, x, y, side, line, now) {
    const owners = this.pool.owners[block];
    if ((this.flashes.get(block) ?? 0) > now) {
      context.fillStyle = styled("--problem");
      context.fillRect(x, y, side, side);
    } else if (owners) {
      context.fillStyle = colour(owners[0]);
      context.fillRect(x, y, side, side);
      if (owners.length > 1) this.drawStripes(context, x, y, side, owners);
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

  /** Draw stripes in the colours of the requests that share a block, up to the available width. Colours may repeat. */
  drawStripes(context, x, y, side, owners) {
    const number = side >= 10 ? 4 : 2;
    const width = side / number;
    for (let i = 0; i < number; i += 1) {
      context.fillStyle = colour(owners[i % owners.length]);
      context.fillRect(x + i * width, y, width, side);
      if (!i) continue;
      context.fillStyle = styled("--panel");
      context.fillRect(x + i * width - 0.5, y, 1, side);
    }
  }

  hit(x, y) {
    if (!this.grid) return null;
    const { size, columns, each } = this.grid;
    const column = Math.floor(x / size);
    const cell = Math.floor(y / size) * columns + column;
    return column < columns && cell * each < this.pool.numBlocks ? cell : null;
  }

  beside(cell, dx, dy) {
    if (!this.grid || !this.pool.numBlocks) return null;
    if (cell === null) return 0;
    const { columns, each } = this.grid;
    const last = Math.ceil(this.pool.numBlocks / each) - 1;
    return Math.min(Math.max(cell + dx + dy * columns, 0), last);
  }

  describe(cell) {
    const { each } = this.grid;
    const blocks = this.blocksOf(cell, each);
    if (each > 1 && blocks.length > 1) return this.describeSeveral(blocks);
    const [block] = blocks;
    const owners = this.pool.owners[block];
    const cached = this.pool.cached[block] ? "holds a cached prefix" : "";
    if (!owners) return `block ${count(block)}: ${cached ? `not in use, ${cached}` : "free"}`;
    return `block ${count(block)}: ${this.names(owners)}; ${references(owners.length)}${cached && `, ${cached}`}`;
  }

  /** Describe the blocks of one cell: their requests, and the numbers of references in total and to one block. */
  describeSeveral(blocks) {
    const used = blocks.map((block) => this.pool.owners[block]).filter(Boolean);
    const cached = blocks.filter((block) => this.pool.cached[block] && !this.pool.owners[block]).length;
    const parts = [`${used.length} in use`, `${cached} cached`, `${blocks.length - used.length - cached} free`];
    const which = `blocks ${count(blocks[0])} to ${count(blocks.at(-1))}: ${parts.join(", ")}`;
    if (!used.length) return which;
    const most = Math.max(...used.map((owners) => owners.length));
    const all = used.reduce((sum, owners) => sum + owners.length, 0);
    return `${which}; ${this.names([...new Set(used.flat())])}; ${references(all)}, ${most} at most to one block`;
  }

  names(owners) {
    const names = owners.slice(0, 4).map((key) => `…${this.pool.requests.get(key)?.id ?? key}`);
    return names.join(", ") + (owners.length > names.length ? ` and ${owners.length - names.length} more` : "");
  }
}
