/* One small chart in SVG: lines with bands, or a stack of shares, with a cross hair and zoom by dragging. */

import * as dom from "./dom.js";
import * as format from "./format.js";
import * as scale from "./scale.js";
import * as visible from "./visible.js";

/**
 * spec: {title, about, unit, log, share, zero, stacked, x: [low, high], button (element in the caption),
 *        series: [{label, colour, dash, points: [{x, y, low, high, n}]}]}
 * on: {hover(x | null, chart), zoom([low, high]), pick(x, chart)}; the chart calls these, and its owner redraws.
 */
export class Chart {
  static HEIGHT = 168;
  static EDGE = { left: 46, right: 10, top: 8, bottom: 22 };

  constructor(spec, on) {
    this.spec = spec;
    this.on = on;
    this.svg = dom.s("svg", { class: "plot", role: "img", tabindex: 0, "aria-label": this.label(),
      height: Chart.HEIGHT });
    this.tip = dom.h("div", { class: "tip", hidden: true });
    this.legend = dom.h("div", { class: "chart-legend" });
    this.caption = dom.h("figcaption");
    this.drawCaption();
    this.element = dom.h("figure", { class: "chart" }, this.caption,
      dom.h("div", { class: "plot-box" }, this.svg, this.tip), this.legend);
    this.resize = new ResizeObserver(() => this.draw());
    this.resize.observe(this.element);
    this.listen();
  }

  drawCaption() {
    const { title, about, unit, log, button } = this.spec;
    const tags = [unit === "share" ? "%" : unit, log ? "log" : null].filter(Boolean).join(", ");
    this.caption.title = about;
    dom.replace(this.caption, dom.h("span", { class: "chart-title" }, title),
      tags && dom.h("span", { class: "unit" }, tags), button);
  }

  label() {
    const names = this.spec.series.map((s) => s.label).join(", ");
    return visible.plain(`${this.spec.title} by step: ${names}. Arrow keys go along the steps, Enter opens the step.`);
  }

  update(spec) {
    this.spec = spec;
    this.svg.setAttribute("aria-label", this.label());
    this.drawCaption();
    this.draw();
  }

  close() {
    this.resize.disconnect();
  }

  draw() {
    const width = Math.floor(this.svg.parentNode.clientWidth);
    if (!width) return;
    this.width = width;
    const { left, right, top, bottom } = Chart.EDGE;
    const [x0, x1] = this.spec.x;
    const shown = this.spec.series.map((s) => s.points.filter((p) => p.x >= x0 && p.x <= x1));
    const yDomain = this.yDomain(shown);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${Chart.HEIGHT}`);
    dom.replace(this.svg);
    this.drawLegend();
    if (!yDomain) {
      this.svg.append(dom.s("text", { class: "nothing", x: width / 2, y: Chart.HEIGHT / 2 },
        "Nothing was measured in these steps."));
      this.px = null;
      return;
    }
    this.px = scale.axis(x0, x1, left, width - right);
    this.py = scale.axis(...yDomain, Chart.HEIGHT - bottom, top, this.spec.log);
    this.drawAxes(x0, x1, yDomain);
    if (this.spec.stacked) this.drawStack(shown);
    else shown.forEach((points, i) => this.drawLine(points, this.spec.series[i]));
    this.cursor = dom.s("line", { class: "cursor", y1: top, y2: Chart.HEIGHT - bottom, visibility: "hidden" });
    this.brush = dom.s("rect", { class: "brush", y: top, height: Chart.HEIGHT - top - bottom, visibility: "hidden" });
    this.svg.append(this.brush, this.cursor);
  }

  /** Common range of the steps of all charts, so that a step has the same position in each. */
  static span(specs) {
    let low = Infinity, high = -Infinity;
    for (const { series } of specs) {
      for (const { points } of series) for (const { x } of points) low = Math.min(low, x), high = Math.max(high, x);
    }
    return low < high ? [low, high] : [low - 0.5, low + 0.5];
  }

  yDomain(shown) {
    if (this.spec.stacked) return shown.some((points) => points.length) ? [0, 1] : null;
    const values = shown.flatMap((points) => points.flatMap((p) => [p.y, p.low, p.high]));
    return scale.domain(values, this.spec);
  }

  drawAxes(x0, x1, [y0, y1]) {
    const { left, right, top, bottom } = Chart.EDGE;
    const floor = Chart.HEIGHT - bottom;
    for (const y of this.spec.log ? scale.logTicks(y0, y1) : scale.ticks(y0, y1, 4)) {
      const at = Math.round(this.py(y)) + 0.5;
      this.svg.append(
        dom.s("line", { class: "grid", x1: left, x2: this.width - right, y1: at, y2: at }),
        dom.s("text", { class: "tick", x: left - 6, y: at + 3.5, "text-anchor": "end" }, this.inUnit(y)));
    }
    const steps = scale.ticks(x0, x1, Math.max(2, Math.floor(this.width / 70))).filter(Number.isInteger);
    steps.forEach((x, i) => {
      const last = i === steps.length - 1;
      this.svg.append(dom.s("text", { class: "tick", x: this.px(x), y: floor + 15,
        "text-anchor": i === 0 && this.px(x) < left + 8 ? "start" : "middle" },
        last ? `step ${format.number(x)}` : format.number(x)));
      if (last && this.px(x) > this.width - right - 30) this.svg.lastChild.setAttribute("text-anchor", "end"),
        this.svg.lastChild.setAttribute("x", this.width - 2);
    });
    this.svg.append(dom.s("line", { class: "axis", x1: left, x2: this.width - right, y1: floor + 0.5,
      y2: floor + 0.5 }));
    this.top = top;
  }

  /** One tick of the y axis. */
  inUnit(y) {
    return this.spec.log ? format.power(y) : this.spec.unit === "share" ? format.percent(y) : format.number(y);
  }

  drawLine(points, series) {
    const drawn = points.filter((p) => this.drawable(p.y));
    const thin = Chart.thin(drawn, this.width);
    const d = thin.map((p, i) => `${i ? "L" : "M"}${this.px(p.x).toFixed(1)} ${this.py(p.y).toFixed(1)}`).join("");
    if (series.bars) this.drawBars(thin, series);
    else this.drawBand(thin, series);
    this.svg.append(dom.s("path", { class: "line", d, stroke: series.colour, "stroke-dasharray": series.dash || null,
      vars: { stroke: series.colour } }));
    if (thin.length <= 40) {
      for (const p of thin) this.svg.append(dom.s("circle", { class: "dot", cx: this.px(p.x), cy: this.py(p.y),
        r: thin.length < 16 ? 2.4 : 1.5, vars: { fill: series.colour } }));
    }
  }

  drawable(y) {
    return format.isNumber(y) && (!this.spec.log || y > 0);
  }

  drawBand(points, series) {
    const band = points.filter((p) => this.drawable(p.low) && this.drawable(p.high));
    if (band.length < 2) return;
    const top = band.map((p) => `${this.px(p.x).toFixed(1)} ${this.py(p.high).toFixed(1)}`);
    const under = band.map((p) => `${this.px(p.x).toFixed(1)} ${this.py(p.low).toFixed(1)}`).reverse();
    this.svg.append(dom.s("path", { class: "band", d: `M${[...top, ...under].join("L")}Z`,
      vars: { fill: series.colour } }));
  }

  drawBars(points, series) {
    for (const p of points) {
      if (!this.drawable(p.low) || !this.drawable(p.high)) continue;
      const x = this.px(p.x), a = this.py(p.low), b = this.py(p.high);
      this.svg.append(dom.s("path", { class: "interval", d: `M${x - 3} ${a}h6M${x} ${a}V${b}M${x - 3} ${b}h6`,
        vars: { stroke: series.colour } }));
    }
  }

  /** Stacked shares, scaled so that the measured shares of a step fill the height. */
  drawStack(shown) {
    const xs = [...new Set(shown.flatMap((points) => points.map((p) => p.x)))].sort((a, b) => a - b);
    const values = shown.map((points) => new Map(points.map((p) => [p.x, Math.max(0, p.y || 0)])));
    const totals = xs.map((x) => values.reduce((sum, of) => sum + (of.get(x) || 0), 0) || 1);
    const places = xs.length > 1 ? xs.map(this.px) : [Chart.EDGE.left, this.width - Chart.EDGE.right];
    let floor = xs.map(() => 0);
    shown.forEach((_, i) => {
      const roof = xs.map((x, j) => floor[j] + (values[i].get(x) || 0) / totals[j]);
      const edge = (ys) => places.map((at,
        j) => `${at.toFixed(1)} ${this.py(ys[Math.min(j, ys.length - 1)]).toFixed(1)}`);
      if (roof.some((y, j) => y > floor[j])) {
        const d = `M${[...edge(roof), ...edge(floor).reverse()].join("L")}Z`;
        this.svg.append(dom.s("path", { class: "layer", d, vars: { fill: this.spec.series[i].colour } }));
      }
      floor = roof;
    });
  }

  /** At most two points (lowest, highest) per pixel: 100,000 steps draw as fast as 500 and lose no spike. */
  static thin(points, width) {
    if (points.length <= 2 * width) return points;
    const size = points.length / width;
    const thinned = [];
    for (let i = 0; i < width; i++) {
      const part = points.slice(Math.floor(i * size), Math.floor((i + 1) * size));
      const low = part.reduce((a, b) => (b.y < a.y ? b : a)), high = part.reduce((a, b) => (b.y > a.y ? b : a));
      thinned.push(...(low.x < high.x ? [low, high] : low === high ? [low] : [high, low]));
    }
    return thinned;
  }

  drawLegend() {
    const { legend, series, stacked, alone } = this.spec;
    const keys = legend || (alone && series.length > 1 ? series : []);
    dom.replace(this.legend,
      keys.map((key) => dom.h("span", { class: "key" }, stacked ? dom.h("i",
      { class: "swatch", vars: { background: key.colour } }) : Chart.dash(key), key.label)));
  }

  static dash({ colour, dash }) {
    return dom.s("svg", { class: "dash", width: 18, height: 8, "aria-hidden": "true" },
      dom.s("line", { x1: 0, x2: 18, y1: 4, y2: 4, "stroke-dasharray": dash, vars: { stroke: colour } }));
  }

  /** Sorted steps at which any series has a value. */
  steps() {
    const [x0, x1] = this.spec.x;
    const measured = new Set(this.spec.series.flatMap((s) => s.points.map((p) => p.x)));
    return [...measured].filter((x) => x >= x0 && x <= x1).sort((a, b) => a - b);
  }

  /** Show the values at the measured step nearest to x; null hides them. `talk` also opens the box of values. */
  point(x, talk) {
    if (!this.px) return;
    const steps = x === null ? [] : this.steps();
    this.tip.hidden = true;
    if (!steps.length) return this.cursor.setAttribute("visibility", "hidden");
    const step = steps.reduce((a, b) => (Math.abs(b - x) < Math.abs(a - x) ? b : a));
    this.at = step;
    const at = this.px(step);
    for (const name of ["x1", "x2"]) this.cursor.setAttribute(name, at);
    this.cursor.setAttribute("visibility", "visible");
    if (talk) this.showValues(step, at);
  }

  showValues(step, at) {
    const rows = this.spec.series.map((s) => [s, s.points.find((p) => p.x === step)]).filter(([,
      p]) => p && format.isNumber(p.y));
    dom.replace(this.tip, dom.h("b", {}, `step ${format.number(step)}`),
      rows.map(([s, p]) => dom.h("div", { class: "tip-row" },
      dom.h("i", { class: "swatch", vars: { background: s.colour } }), dom.h("span", {}, s.label),
        dom.h("span", { class: "num" }, Chart.reading(p, this.spec.unit)))));
    this.tip.hidden = false;
    const wide = this.tip.offsetWidth, room = this.width - at - 14;
    this.tip.style.left = `${Math.max(0, room > wide ? at + 12 : at - wide - 12)}px`;
  }

  static reading(p, unit) {
    const text = unit === "share" ? format.percent : unit === "s" ? format.seconds : format.number;
    const spread = format.isNumber(p.low) && format.isNumber(p.high) ? ` (${text(p.low)} to ${text(p.high)})` : "";
    return text(p.y) + spread;
  }

  listen() {
    let from = null;
    const pixel = (event) => event.clientX - this.svg.getBoundingClientRect().left;
    this.svg.addEventListener("pointerdown",
      (event) => { from = this.px && event.button === 0 ? pixel(event) : null; });
    this.svg.addEventListener("pointermove", (event) => {
      if (!this.px) return;
      if (from !== null && Math.abs(pixel(event) - from) > 4) this.drag(from, pixel(event));
      this.on.hover(this.px.invert(pixel(event)), this);
    });
    this.svg.addEventListener("pointerup", (event) => {
      if (from === null) return;
      const to = pixel(event), start = from;
      from = null;
      this.brush.setAttribute("visibility", "hidden");
      if (Math.abs(to - start) > 8) this.on.zoom([start, to].map(this.px.invert).sort((a, b) => a - b));
      else this.on.pick(this.at, this);
    });
    this.svg.addEventListener("pointerleave", () => {
      from = null;
      if (this.brush) this.brush.setAttribute("visibility", "hidden");
      this.on.hover(null, this);
    });
    this.svg.addEventListener("blur", () => this.on.hover(null, this));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  drag(from, to) {
    this.brush.setAttribute("x", Math.min(from, to));
    this.brush.setAttribute("width", Math.abs(to - from));
    this.brush.setAttribute("visibility", "visible");
  }

  key(event) {
    if (event.key === "Enter" && this.at !== undefined) return this.on.pick(this.at, this);
    const steps = this.steps(), now = Math.max(0, steps.indexOf(this.at));
    const next = this.at === undefined ? 0 : now + 1;
    const to = { ArrowRight: next, ArrowLeft: now - 1, Home: 0, End: steps.length }[event.key];
    if (to === undefined) return undefined;
    event.preventDefault();
    return this.on.hover(steps[Math.min(steps.length - 1, Math.max(0, to))], this);
  }
}
