// The tape: each step is a row of coloured segments. A segment's width is its number of tokens, a row's height its duration.

import { count, duration } from "../dom.js";
import { inspect, View } from "./canvas.js";
import { colour, styled } from "./colours.js";

const PIXELS_PER_SECOND = 60; // at most
// Maximum fraction of the view's height for the slowest of the latest steps, so that other steps stay visible.
const SLOWEST_SHARE = 0.25;
const LATEST = 40;
// Seconds between two labels on the right, and the height in pixels that they need.
const INTERVALS = [1, 2, 5, 10, 20, 60, 120, 300, 600];
const MIN_INTERVAL = 50;
const MIN_ROW = 3;
const GAP = 7; // pixels for a period without steps
const MAX_ROWS = 400;
const AXIS = 44; // pixels for the labels on the right
const SPACE = 5; // pixels after a bar, for the mark of its sampled token
const STRIPE = 4; // pixels between two stripes of image tokens
const FRESH = 1;
const SAMPLES = 2;

const isDecode = ([, tokens, , flags, drafts = 0]) => tokens - drafts === 1 && !(flags & FRESH);

export class Tape {
  constructor(view, readout, pool) {
    this.pool = pool;
    this.rows = [];
    this.chosen = null;
    this.mostTokens = 1;
    this.view = new View(view.querySelector("canvas"), (...place) => this.draw(...place));
    this.unmark = inspect(view, readout, {
      hit: (x, y) => this.hit(x, y),
      step: (item, dx, dy) => this.beside(item, dx, dy),
      describe: (item) => this.describe(item),
      show: (item) => {
        this.chosen = item;
        this.view.redraw();
      },
    });
  }

  /** Clear the tape. Without a snapshot, no model is loaded. */
  begin(snapshot) {
    this.rows = [];
    this.unmark();
    this.mostTokens = snapshot?.limits.max_num_batched_tokens ?? 1;
    this.view.redraw();
  }

  add(rows) {
    for (const row of rows) {
      row.bars = row.segments.filter((segment) => !isDecode(segment)).length;
      row.gap = row.idle > 0.5 ? GAP : 0;
      row.dots = row.segments.filter(isDecode).reduce((sum, [, tokens]) => sum + tokens, 0);
      // The pool deletes requests when they end, but the tape still names them.
      row.names = new Map(row.segments.map(([key]) => [key, this.pool.requests.get(key)]));
    }
    this.rows = [...this.rows, ...rows].slice(-MAX_ROWS);
    if (rows.length) this.view.redraw();
  }

  /** Return the number of pixels per second in a view of this height. */
  scale(height) {
    const slowest = Math.max(...this.rows.slice(-LATEST).map((row) => row.seconds), 0);
    return Math.min(PIXELS_PER_SECOND, (SLOWEST_SHARE * height) / slowest);
  }

  /** Return the visible rows, newest first, each with its top and height. */
  *seen(height) {
    const scale = this.scale(height);
    let top = height;
    for (let i = this.rows.length - 1; i >= 0 && top > 0; i -= 1) {
      const row = this.rows[i];
      const tall = Math.max(MIN_ROW, scale * row.seconds);
      top -= tall;
      yield [row, top, tall];
      top -= row.gap;
    }
  }

  draw(context, width, space) {
    const dot = this.dotWidth(width, space);
    for (const [row, top, tall] of this.seen(space)) {
      const height = Math.max(tall - 1, 1.5);
      for (const [left, right, segment] of this.places(row, width, dot)) {
        const [key, , , flags] = segment;
        context.fillStyle = colour(key);
        if (isDecode(segment)) {
          this.drawDecode(context, segment, left, top + 0.5, dot, height);
          continue;
        }
        context.globalAlpha = flags & FRESH ? 1 : 0.6;
        context.fillRect(left, top + 0.5, Math.max(right - left - 1, 1), height);
        context.globalAlpha = 1;
        if (flags & SAMPLES) context.fillRect(right + 1, top + 0.5, 3, height);
        this.drawImages(context, segment, left, right, top + 0.5, height);
      }
      context.globalAlpha = 1;
      if (row.gap) this.drawGap(context, width, top - row.gap / 2, row.idle);
    }
    this.drawAxis(context, width, space);
    if (this.chosen) this.drawChosen(context, width, space, dot);
  }

  /** Draw stripes over the share of a bar that are image tokens. */
  drawImages(context, [, tokens, , , , imageTokens = 0], left, right, top, height) {
    const end = left + ((right - left) * imageTokens) / tokens;
    context.fillStyle = styled("--panel");
    for (let x = left + 2; x < end - 1; x += STRIPE) context.fillRect(x, top, 1, height);
  }

  /** Draw a square for the token, and a pale square for each draft after it. */
  drawDecode(context, [, tokens], left, top, dot, height) {
    for (let i = 0; i < tokens; i += 1) {
      context.globalAlpha = i ? 0.35 : 1;
      context.fillRect(left + i * dot, top, Math.max(dot - 1, 1), height);
    }
    context.globalAlpha = 1;
  }

  /** Return the width of a decode, which is the same in all visible rows, so that a request keeps its column. */
  dotWidth(width, height) {
    let most = 8;
    for (const [row] of this.seen(height)) most = Math.max(most, row.dots);
    return Math.min(Math.max((0.5 * (width - AXIS)) / most, 2.5), 12);
  }

  /** Return the positions of a row's segments: [left, right, segment]. */
  *places(row, width, dot) {
    const scale = (width - AXIS - dot * row.dots - SPACE * row.bars - 3) / this.mostTokens;
    let left = 0;
    for (const segment of row.segments) {
      const tokens = segment[1];
      const right = left + (isDecode(segment) ? dot * tokens : Math.max(tokens * scale, 4));
      yield [left, right, segment];
      left = right + (isDecode(segment) ? 0 : SPACE);
    }
  }

  drawGap(context, width, y, idle) {
    context.strokeStyle = styled("--line");
    context.setLineDash([3, 3]);
    context.strokeRect(0, y, width - AXIS, 0);
    context.setLineDash([]);
    context.fillStyle = styled("--quiet");
    context.font = "10px system-ui, sans-serif";
    context.fillText(duration(idle), width - AXIS + 4, y + 3);
  }

  drawAxis(context, width, height) {
    context.fillStyle = styled("--quiet");
    context.font = "10px system-ui, sans-serif";
    const scale = this.scale(height);
    const interval = INTERVALS.find((one) => one * scale >= MIN_INTERVAL) ?? INTERVALS.at(-1);
    for (let seconds = interval; seconds * scale < height - 8; seconds += interval) {
      const y = height - seconds * scale;
      context.fillRect(width - AXIS + 36, y, 5, 1);
      context.fillText(`${seconds} s`, width - AXIS + 4, y + 3);
    }
  }

  drawChosen(context, width, height, dot) {
    for (const [row, top, tall] of this.seen(height)) {
      if (row !== this.chosen.row) continue;
      const place = [...this.places(row, width, dot)][this.chosen.index];
      if (!place) return;
      context.strokeStyle = styled("--text");
      context.lineWidth = 1.5;
      context.strokeRect(place[0], top, place[1] - place[0], tall);
    }
  }

  hit(x, y) {
    const { clientWidth: width, clientHeight: height } = this.view.canvas;
    const dot = this.dotWidth(width, height);
    for (const [row, top, tall] of this.seen(height)) {
      if (y < top || y > top + tall) continue;
      const index = [...this.places(row, width, dot)].findIndex(([left, right]) => x >= left && x <= right);
      return { row, index: Math.max(index, 0) };
    }
    return null;
  }

  beside(item, dx, dy) {
    if (!this.rows.length) return null;
    const at = item === null ? -1 : this.rows.indexOf(item.row);
    const row = this.rows[at < 0 ? this.rows.length - 1 : Math.min(Math.max(at + dy, 0), this.rows.length - 1)];
    const index = item === null ? 0 : item.index + dx;
    return { row, index: Math.min(Math.max(index, 0), row.segments.length - 1) };
  }

  describe({ row, index }) {
    const segment = row.segments[index];
    const [key, tokens, context, flags, drafts, imageTokens] = segment;
    const request = row.names.get(key);
    const of = request ? `request …${request.id} (prompt ${count(request.prompt_tokens)})` : `request ${key}`;
    const decode = drafts ? `decode with ${drafts} drafts` : "decode";
    const kind = flags & FRESH ? "fresh" : isDecode(segment) ? decode : "chunk";
    const steps = row.steps > 1 ? `steps ${count(row.step)} to ${count(row.step + row.steps - 1)}` : `step ${count(row.step)}`;
    const sampled = flags & SAMPLES ? "sampled a token" : "sampled nothing";
    const each = tokens === 1 ? "1 token" : `${count(tokens)} tokens`;
    const images = imageTokens ? ` (${count(imageTokens)} of images)` : "";
    return `${steps}, ${duration(row.seconds)}: ${of}, ${kind}, ${each}${images} after ${count(context)}, ${sampled}`;
  }
}
