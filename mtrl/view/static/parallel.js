/* Parallel coordinates: one axis per setting and one for the objective, with one line per job. */

import { s } from "./dom.js";
import * as format from "./format.js";
import { axis } from "./scale.js";
import * as visible from "./visible.js";

const HEIGHT = 260, TOP = 40, BOTTOM = 22, SIDE = 70, LEAST = 110; // pixels
const MOST_TICKS = 8;
const WIDE = 100; // ratio of largest to smallest value from which a scale is logarithmic
const CHARS = 14; // of a tick
const WIDTH = 8; // pixels of a character of a name

/** `point(number)` is called with the job under the pointer, or null. */
export class Parallel {
  constructor(sweep, point) {
    this.sweep = sweep;
    this.onPoint = point;
    this.lines = new Map();
    this.element = s("svg", { class: "parallel", role: "img",
      "aria-label": `Settings and ${visible.plain(sweep.objective)} of ${format.plural(sweep.jobs.length, "job")}` });
    this.watcher = new ResizeObserver(() => this.draw());
    this.watcher.observe(this.element);
  }

  close() {
    this.watcher.disconnect();
  }

  draw() {
    const { keys, jobs, objective } = this.sweep;
    const columns = [...keys.map((key) => column(brief(key), jobs.map((job) => job.settings[key]))),
      column(objective, jobs.map((job) => job.value))];
    const width = Math.max(this.element.clientWidth, SIDE * 2 + LEAST * (columns.length - 1));
    const x = (i) => SIDE + (i * (width - 2 * SIDE)) / Math.max(1, columns.length - 1);
    this.element.textContent = "";
    this.element.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    // The best job is drawn last, above the others.
    for (let row = jobs.length - 1; row >= 0; row--) this.element.append(this.line(jobs[row], row, columns, x));
    const chars = Math.min(2 * CHARS, Math.floor((x(1) - x(0)) / WIDTH));
    columns.forEach((c, i) => this.element.append(ruler(c, x(i), chars, i === columns.length - 1)));
  }

  line(job, row, columns, x) {
    const points = columns.map((c, i) => [x(i), c.place(row)]).filter(([, y]) => y !== null);
    const path = points.map(([px, py], i) => `${i ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`).join("");
    const best = this.sweep.best && this.sweep.best.number === job.number;
    const found = s("g", { class: `job ${job.status in KNOWN ? job.status : "other"}${best ? " best" : ""}`,
      vars: { "--share": share(columns.at(-1), row, this.sweep.direction) },
      onmouseenter: () => this.onPoint(job.number), onmouseleave: () => this.onPoint(null) },
      s("title", {}, `job ${job.number}: ${format.number(job.value)}, ${visible.plain(job.status)}`),
      s("path", { class: "reach", d: path }), s("path", { class: "seen", d: path }));
    this.lines.set(job.number, found);
    return found;
  }

  point(number) {
    this.element.classList.toggle("pointing", number !== null);
    for (const [other, line] of this.lines) line.classList.toggle("pointed", other === number);
  }
}

const KNOWN = { __proto__: null, finished: 1, pruned: 1, failed: 1, running: 1 };

/** One axis: the positions of the values, and their labels. */
function column(name, values) {
  const numbers = values.map((v) => (v === null || v === undefined || v === "" ? null : Number(v)));
  const known = values.filter((v) => v !== null && v !== undefined);
  const isNumeric = known.length > 0 && known.every((v) => v !== "" && Number.isFinite(Number(v)));
  return isNumeric ? numeric(name, numbers) : categories(name, values, [...new Set(known.map(String))].sort());
}

function numeric(name, numbers) {
  const known = numbers.filter((v) => v !== null);
  const low = Math.min(...known), high = Math.max(...known);
  const log = low > 0 && high / low >= WIDE;
  const at = low === high ? () => (TOP + HEIGHT - BOTTOM) / 2 : axis(low, high, HEIGHT - BOTTOM, TOP, log);
  const distinct = [...new Set(known)];
  const shown = distinct.length <= MOST_TICKS ? distinct
    : [0, 1, 2, 3, 4].map((i) => (log ? low * (high / low) ** (i / 4) : low + ((high - low) * i) / 4));
  return { name, place: (row) => (numbers[row] === null ? null : at(numbers[row])),
    ticks: apart(shown.map((v) => [at(v), format.value(v)])) };
}

function categories(name, values, names) {
  const at = (i) => (names.length === 1 ? (TOP + HEIGHT - BOTTOM) / 2
    : HEIGHT - BOTTOM - (i * (HEIGHT - BOTTOM - TOP)) / (names.length - 1));
  return { name, ticks: apart(names.map((text, i) => [at(i), visible.plain(text)])),
    place: (row) => (values[row] === null || values[row] === undefined ? null : at(names.indexOf(String(values[row])))) };
}

/** Labels that do not overlap. */
function apart(ticks) {
  const sorted = [...ticks].sort((a, b) => a[0] - b[0]), shown = [];
  for (const tick of sorted) if (!shown.length || tick[0] - shown.at(-1)[0] >= 13) shown.push(tick);
  return shown;
}

function ruler(column, x, chars, isLast) {
  const side = isLast ? { x: x + 6, "text-anchor": "start" } : { x: x - 6, "text-anchor": "end" };
  return s("g", { class: `ruler${isLast ? " objective" : ""}` }, s("title", {}, visible.plain(column.name)),
    s("line", { x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }),
    s("text", { class: "name", x, y: TOP - 16, "text-anchor": "middle" }, visible.line(column.name, chars)),
    column.ticks.map(([y, text]) => s("text", { ...side, y: y + 4 }, s("title", {}, text), visible.line(text, CHARS))));
}

/** 0…1: quality of a job relative to the others. */
function share(column, row, direction) {
  const y = column.place(row);
  if (y === null) return 0;
  const up = (HEIGHT - BOTTOM - y) / (HEIGHT - BOTTOM - TOP);
  return Math.min(1, Math.max(0, direction === "minimize" ? 1 - up : up));
}

function brief(key) {
  return key.split(".").slice(-2).join(".");
}
