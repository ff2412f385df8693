/* Timeline of a run: the spans of generation, training and evaluation, with one row per lane. */

import { source } from "./data.js";
import * as dom from "./dom.js";
import * as format from "./format.js";
import * as route from "./route.js";
import * as scale from "./scale.js";
import * as visible from "./visible.js";

const { h, s } = dom;
const NAMES = ["generate", "credit", "update", "sync", "evaluate", "save"];
const LANE = 30, LEFT = 76, RIGHT = 12, TOP = 6, FOOT = 22;

export class Gantt {
  constructor(app) {
    this.app = app;
    this.svg = s("svg", { class: "plot gantt", role: "img", tabindex: 0 });
    this.tip = h("div", { class: "tip", hidden: true });
    this.tools = h("div", { class: "tools" });
    this.shares = h("p", { class: "shares" });
    this.element = h("section", { class: "card timeline", "aria-label": "Timeline", hidden: true },
      h("div", { class: "toolbar" }, h("h2", {}, "Timeline"), this.tools),
        h("div", { class: "plot-box" }, this.svg, this.tip), this.shares);
    this.resize = new ResizeObserver(() => this.draw());
    this.resize.observe(this.element);
    this.listen();
  }

  async open(values) {
    this.values = values;
    const with_timeline = this.app.runs.filter((run) => run.has_timeline);
    this.run = with_timeline.find((run) => run.id === values.timeline) || with_timeline[0];
    this.element.hidden = !this.run;
    if (!this.run) return;
    if (this.spans && this.of === this.run.id) return this.draw();
    await this.load();
  }

  async load() {
    const of = this.run.id;
    if (of !== this.of) {
      this.of = of;
      this.range = this.spans = null;
      dom.replace(this.shares);
      this.draw();
    }
    try {
      const { spans } = await source.timeline(of);
      if (of !== this.run.id) return;
      this.spans = spans.filter((span) => format.isNumber(span.start) && format.isNumber(span.end));
      this.drawTools();
      this.draw();
    } catch (error) {
      dom.replace(this.shares, error.message);
    }
  }

  drawTools() {
    const runs = this.app.runs.filter((run) => run.has_timeline);
    const choice = runs.length > 1 ? h("select", { id: "timeline-run", "aria-label": "Run",
      onchange: (event) => route.change({ timeline: event.target.value }, true) },
      runs.map((run) => h("option", { value: run.id, selected: run === this.run },
        visible.plain(`${run.name} · ${run.path}`)))) : null;
    const part = h("button", { type: "button", class: "button", id: "timeline-last", onclick: () => this.last(5) },
      "Last 5 steps");
    const whole = h("button", { type: "button", class: "button", id: "timeline-whole",
      onclick: () => this.zoom(null) }, "Whole run");
    dom.replace(this.tools, choice, part, whole);
  }

  last(count) {
    const steps = [...new Set(this.spans.map((span) => span.step))].slice(-count);
    const shown = this.spans.filter((span) => steps.includes(span.step));
    if (shown.length) this.zoom([Math.min(...shown.map((x) => x.start)), Math.max(...shown.map((x) => x.end))]);
  }

  zoom(range) {
    this.range = range;
    this.draw();
  }

  draw() {
    const width = this.svg.parentNode.clientWidth;
    if (!width) return;
    dom.replace(this.svg);
    this.px = null;
    if (!this.spans) return;
    if (!this.spans.length) return dom.replace(this.shares, "No span has been recorded yet.");
    const lanes = [...new Set(this.spans.map((span) => span.lane))].sort();
    const height = TOP + lanes.length * LANE + FOOT;
    const [low, high] = this.range || [0, this.spans.reduce((most, span) => Math.max(most, span.end), 0)];
    this.px = scale.axis(low, high, LEFT, width - RIGHT);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
    for (const t of scale.ticks(low, high, Math.max(2, Math.floor(width / 90)))) {
      this.svg.append(s("line", { class: "grid", x1: this.px(t), x2: this.px(t), y1: TOP, y2: height - FOOT }),
        s("text", { class: "tick", x: this.px(t), y: height - 6, "text-anchor": "middle" }, format.seconds(t)));
    }
    lanes.forEach((lane, i) => this.svg.append(s("text", { class: "tick lane", x: 0, y: TOP + i * LANE + 18 },
      visible.line(lane, 10))));
    for (const span of this.spans) {
      if (span.end < low || span.start > high) continue;
      const x = Math.max(LEFT, this.px(span.start)), end = Math.min(width - RIGHT, this.px(span.end));
      const bar = s("rect", { class: "span", x, y: TOP + lanes.indexOf(span.lane) * LANE + 4,
        width: Math.max(0.75, end - x), height: LANE - 8, vars: { fill: this.colour(span.name) } });
      bar.span = span;
      this.svg.append(bar);
    }
    this.brush = s("rect", { class: "brush", y: TOP, height: lanes.length * LANE, visibility: "hidden" });
    this.svg.append(this.brush);
    this.drawShares(low, high);
  }

  colour(name) {
    const known = NAMES.indexOf(name);
    return scale.categorical(known < 0 ? 7 : known);
  }

  /** Summary of the visible time; it is also the alternative text of the picture. */
  drawShares(low, high) {
    const sums = new Map();
    for (const { name, start, end } of this.spans) {
      const inside = Math.min(end, high) - Math.max(start, low);
      if (inside > 0) sums.set(name, (sums.get(name) || 0) + inside);
    }
    const parts = [...sums].sort((a, b) => b[1] - a[1]);
    dom.replace(this.shares,
      parts.map(([name, sum]) => h("span", { class: "key" },
      h("i", { class: "swatch", vars: { background: this.colour(name) } }),
      `${visible.plain(name)} `, h("small", { class: "num" },
        `${format.seconds(sum)}, ${format.percent(sum / (high - low))}`))));
    this.svg.setAttribute("aria-label",
      `Timeline: ${parts.map(([name, sum]) => `${visible.plain(name)} ${format.seconds(sum)}`).join(", ")}`);
  }

  listen() {
    let from = null;
    const pixel = (event) => event.clientX - this.svg.getBoundingClientRect().left;
    this.svg.addEventListener("pointerdown",
      (event) => { from = this.px && event.button === 0 ? pixel(event) : null; });
    this.svg.addEventListener("pointermove", (event) => {
      this.showSpan(event.target.span, pixel(event));
      if (from === null || !this.brush) return;
      this.brush.setAttribute("x", Math.min(from, pixel(event)));
      this.brush.setAttribute("width", Math.abs(pixel(event) - from));
      this.brush.setAttribute("visibility", "visible");
    });
    this.svg.addEventListener("pointerup", (event) => {
      if (from === null) return;
      const ends = [from, pixel(event)].sort((a, b) => a - b);
      from = null;
      if (this.px && ends[1] - ends[0] > 8) this.zoom(ends.map(this.px.invert));
      else if (event.target.span) route.go("browse", { run: this.run.id, step: event.target.span.step });
    });
    this.svg.addEventListener("pointerleave", () => {
      from = null;
      this.tip.hidden = true;
      if (this.brush) this.brush.setAttribute("visibility", "hidden");
    });
    this.svg.addEventListener("dblclick", () => this.zoom(null));
  }

  showSpan(span, at) {
    this.tip.hidden = !span;
    if (!span) return;
    dom.replace(this.tip, h("b", {}, `${visible.plain(span.name)}, step ${format.number(span.step)}`),
      h("div", {}, `${format.seconds(span.end - span.start)}, from ${format.seconds(span.start)}`));
    this.tip.style.left = `${Math.max(0, Math.min(at + 12, this.svg.clientWidth - this.tip.offsetWidth))}px`;
  }

  async changed(names) {
    if (this.run && names.includes("timeline")) await this.load();
  }

  close() {
    this.resize.disconnect();
  }
}
