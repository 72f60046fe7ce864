// Charts of the last minutes: queue length, token rates and latencies.

import { duration, el } from "../dom.js";
import { View } from "./canvas.js";
import { styled } from "./colours.js";

const WINDOW = 180; // seconds
const SPACING = 1;

// After a period without requests, only later values count, which arrive within a second.
const seconds = (now, before) => Math.min(now.time - before.time, before.running || before.waiting ? Infinity : SPACING);
const rate = (name) => (now, before) => (now[name] - before[name]) / seconds(now, before);
const mean = (name) => (now, before) => {
  const [sum, number] = [now[name][0] - before[name][0], now[name][1] - before[name][1]];
  return number > 0 ? sum / number : null;
};
const perSecond = (value) => (value >= 10 ? Math.round(value).toString() : value.toFixed(1));

const CHARTS = [
  {
    title: "Running, and waiting",
    lines: [(now) => now.running, (now) => now.waiting],
    quiet: [0, 0],
    text: ([running, waiting]) => `${running} · ${waiting}`,
  },
  {
    title: "Tokens/s out, and prompts",
    lines: [rate("generation_tokens"), rate("prompt_tokens")],
    quiet: [0, 0],
    text: ([out, prompts]) => `${perSecond(out)} · ${perSecond(prompts)}`,
  },
  { title: "Time to first token, mean", lines: [mean("first_token")], quiet: [null], text: ([value]) => said(value) },
  { title: "Between tokens, mean", lines: [mean("inter_token")], quiet: [null], text: ([value]) => said(value) },
];

const said = (value) => (value === null ? "–" : duration(value));

export class History {
  constructor(list) {
    this.latest = null; // `stats` of the latest frame
    this.counted = null; // stats up to which charts have been drawn
    this.charts = CHARTS.map((chart) => {
      const [value, canvas] = [el("dd", { className: "value", textContent: "–" }), el("canvas", { "aria-hidden": "true" })];
      list.append(el("div", { className: "chart" }, el("dt", { textContent: chart.title }), value, el("dd", {}, canvas)));
      return { ...chart, value, points: [], view: new View(canvas, (...place) => this.draw(chart.title, ...place)) };
    });
    this.timer = setInterval(() => this.tick(), 1000 * SPACING);
  }

  /** Clear the charts; `stats` is null if no model is loaded. */
  begin(stats) {
    this.counted = stats;
    this.latest = stats;
    for (const chart of this.charts) {
      chart.points = [];
      chart.value.textContent = "–";
      chart.view.redraw();
    }
  }

  add(stats) {
    this.latest = stats;
  }

  /** Update the charts. Called once a second. Does nothing if the charts' period had no activity. */
  tick() {
    if (!this.latest || document.hidden) return;
    const { latest, counted } = this;
    const isNews = latest.time - counted.time >= SPACING / 2;
    const isQuiet = !isNews && !latest.running && !latest.waiting;
    if (isQuiet && this.charts.every(({ points }) => points.flat().every((value) => !value))) return;
    if (isNews) this.counted = latest;
    for (const chart of this.charts) {
      // There are no new stats during a step that takes longer than a second.
      const held = isQuiet ? chart.quiet : (chart.points.at(-1) ?? chart.quiet);
      const point = isNews ? chart.lines.map((line) => line(latest, counted)) : held;
      chart.points = [...chart.points, point].slice(-WINDOW / SPACING);
      const known = chart.lines.length > 1 ? point : (chart.points.findLast(([value]) => value) ?? [null]);
      chart.value.textContent = chart.text(known);
      chart.view.redraw();
    }
  }

  draw(title, context, width, height) {
    const { points } = this.charts.find((chart) => chart.title === title);
    const most = Math.max(...points.flat().map((value) => value ?? 0), 1e-9);
    const step = width / (WINDOW / SPACING - 1);
    const names = ["--accent", "--quiet"];
    for (let line = 0; line < (points[0]?.length ?? 0); line += 1) {
      context.strokeStyle = styled(names[line]);
      context.lineWidth = 1.5;
      context.setLineDash(line ? [3, 2] : []);
      context.beginPath();
      points.forEach((point, i) => {
        if (point[line] === null) return; // no token in that second: the line continues at the next second with one
        const x = width - (points.length - 1 - i) * step;
        context.lineTo(x, height - 2 - (height - 5) * (point[line] / most));
      });
      context.stroke();
    }
    context.setLineDash([]);
  }
}
