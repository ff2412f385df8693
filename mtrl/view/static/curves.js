/* Small multiples of the metrics of all runs. */

import { Chart } from "./chart.js";
import { source } from "./data.js";
import * as dom from "./dom.js";
import * as format from "./format.js";
import { KEYS, linesOf, PANELS, single } from "./panels.js";
import * as route from "./route.js";
import * as scale from "./scale.js";
import { entities, points, smooth } from "./series.js";
import * as visible from "./visible.js";

const { h } = dom;
const DASHES = [null, "5 3", "1.5 3", "8 3 1.5 3"];
const MOST_FOUND = 30;

export class Curves {
  constructor(app, store) {
    this.app = app;
    this.store = store;
    this.charts = new Map();
    this.find = h("input", { type: "search", class: "search", placeholder: "Find a metric ( / )",
      "aria-label": "Find a metric by its name",
      oninput: () => route.change({ find: this.find.value.trim() || null }, true) });
    this.runs = h("div", { class: "run-keys", role: "group", "aria-label": "Runs shown" });
    this.tools = h("div", { class: "tools" });
    this.note = h("p", { class: "note", hidden: true });
    this.grid = h("div", { class: "charts" });
    this.element = h("section", { class: "curves", "aria-label": "Curves" },
      h("div", { class: "toolbar" }, h("h2", {}, "Curves"), this.find, this.tools), this.runs, this.note, this.grid);
  }

  async open(values) {
    this.values = values;
    if (document.activeElement !== this.find) this.find.value = values.find || "";
    this.drawTools();
    this.draw();
    try {
      await Promise.all(this.app.runs.map((run) => this.store.need(run.id, KEYS)));
      await this.needFound();
    } catch (error) {
      this.showMessage(error.message);
    }
    if (values === this.values) this.draw();
  }

  /** Fetch the metrics whose names contain every typed word, and the pinned ones. */
  async needFound() {
    const keys = [...this.found(), ...this.pinnedKeys()];
    if (keys.length) await Promise.all(this.app.runs.map((run) => this.store.need(run.id, keys)));
  }

  found() {
    const words = (this.values.find || "").toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return [];
    const fits = (key) => words.every((word) => key.toLowerCase().includes(word));
    return this.store.keys(this.app.runs).filter(fits).slice(0, MOST_FOUND);
  }

  pinnedKeys() {
    return route.names(this.values.keep);
  }

  hidden() {
    return new Set(route.names(this.values.hide));
  }

  zoom() {
    const [low, high] = (this.values.zoom || "").split("_").map(Number);
    return format.isNumber(low) && format.isNumber(high) && high > low ? [low, high] : null;
  }

  drawTools() {
    const families = new Set(this.app.runs.map((run) => run.family)).size < this.app.runs.length;
    const window = this.values.smooth || "1";
    const smoothing = h("label", { class: "choice" }, "Smooth ",
      h("select", { id: "smooth",
      onchange: (event) => route.change({ smooth: event.target.value === "1" ? null : event.target.value }) },
      [["1", "off"], ["5", "5 points"], ["20", "20 points"]].map(([value, text]) => h("option",
        { value, selected: value === window }, text))));
    const seeds = families ? h("label", { class: "choice" },
      h("input", { type: "checkbox", id: "group-seeds", checked: this.values.seeds !== "apart",
      onchange: (event) => route.change({ seeds: event.target.checked ? null : "apart" }) }), " join seeds") : null;
    const whole = this.zoom() ? h("button", { type: "button", class: "button", id: "whole",
      onclick: () => route.change({ zoom: null }) }, "Show all steps") : null;
    dom.replace(this.tools, seeds, smoothing, whole);
  }

  drawRuns(all) {
    const hidden = this.hidden();
    if (all.length < 2) return dom.replace(this.runs);
    dom.replace(this.runs,
      all.map((entity, i) => h("button", { type: "button", class: "chip run-key", id: `run-key-${i}`,
      "aria-pressed": String(!hidden.has(entity.key)), title: "Show or hide it",
      onclick: () => {
        if (!hidden.delete(entity.key)) hidden.add(entity.key);
        route.change({ hide: route.joined([...hidden]) }, true);
      } }, h("i", { class: "swatch", vars: { background: entity.colour } }), visible.plain(entity.label))));
  }

  draw() {
    const all = entities(this.app.runs, this.values.seeds !== "apart", scale.categorical);
    this.drawRuns(all);
    const hidden = this.hidden(), shown = all.filter((entity) => !hidden.has(entity.key));
    const specs = this.panels().flatMap((panel) => this.specs(panel,
      shown)).filter((spec) => spec.series.some((s) => s.points.length));
    const whole = this.zoom() || Chart.span(specs);
    specs.forEach((spec) => { spec.x = whole; });
    const ids = new Set(specs.map((spec) => spec.id));
    for (const [id, chart] of this.charts) if (!ids.has(id)) chart.close(), chart.element.remove(),
      this.charts.delete(id);
    specs.forEach((spec, i) => this.place(spec, i));
    const why = this.values.find ? "No metric has this name." : "No step has been measured yet.";
    this.showMessage(specs.length ? "" : shown.length ? why : "All runs are hidden.");
  }

  panels() {
    if (this.values.find) return this.found().map(single);
    return [...PANELS, ...this.pinnedKeys().map(single)];
  }

  /** Chart specs of a panel: a stacked panel has one chart per run, other panels show all runs in one chart. */
  specs(panel, shown) {
    const groups = panel.stacked ? shown.map((entity) => [entity]) : [shown];
    return groups.map((group) => {
      const lines = linesOf(panel, this.store.keys(this.app.runs));
      const alone = group.length === 1;
      const made = group.flatMap((entity, e) => lines.map((line, i) => this.line(panel, entity, line, i, alone,
        lines.length)));
      const whose = panel.stacked && shown.length > 1 ? `: ${visible.plain(group[0].label)}` : "";
      const title = panel.title + whose;
      const legend = alone ? null : lines.map((line, i) => ({ label: line.label, colour: "var(--ink-2)",
        dash: DASHES[i % 4] }));
      const hasValue = panel.stacked ? (p) => p.y > 0 : (p) => format.isNumber(p.y);
      const series = made.filter((s) => s.points.some(hasValue));
      return { ...panel, id: panel.stacked ? `${panel.title}\n${group[0].key}` : panel.id || title, title, series,
        runs: group.flatMap((entity) => entity.runs), button: panel.id ? this.pinButton(panel.id) : null,
        legend: legend && lines.length > 1 ? legend.filter((l) => series.some((s) => s.line === l.label)) : null,
        alone };
    });
  }

  line(panel, entity, line, i, alone, lines) {
    const made = points(this.store, entity, line, panel.factor);
    const window = panel.stacked ? 1 : Number(this.values.smooth || 1);
    const crowded = lines > 2 && entity.runs.length > 1; // too many overlapping bands are unreadable
    return {
      points: smooth(crowded ? made.map((p) => ({ ...p, low: null, high: null })) : made, window), line: line.label,
        colour: alone ? scale.categorical(line.hue ?? i) : entity.colour, dash: alone ? null : DASHES[i % 4],
      bars: Boolean(line.low) && entity.runs.length === 1,
        label: alone ? line.label : visible.plain(entity.label) + (lines > 1 ? `, ${line.label}` : ""),
    };
  }

  place(spec, i) {
    let chart = this.charts.get(spec.id);
    if (chart) chart.update(spec);
    else {
      chart = new Chart(spec, { hover: (x, on) => this.hover(x, on), zoom: (range) => this.zoomTo(range),
        pick: (step, on) => this.pick(step, on.spec.runs) });
      this.charts.set(spec.id, chart);
    }
    if (this.grid.children[i] !== chart.element) this.grid.insertBefore(chart.element, this.grid.children[i] || null);
  }

  pinButton(key) {
    const pinned = this.pinnedKeys(), others = pinned.filter((other) => other !== key);
    const unpin = others.length < pinned.length;
    const act = () => route.change(unpin ? { keep: route.joined(others) }
      : { keep: route.joined([...pinned, key]), find: null });
    return h("button", { type: "button", class: "quiet", id: `pin-${key}`, onclick: act,
      title: unpin ? "Show this curve no longer below the others" : "Pin this curve below the others" },
      unpin ? "unpin" : "pin");
  }

  hover(x, on) {
    for (const chart of this.charts.values()) chart.point(x, chart === on);
  }

  zoomTo(range) {
    route.change({ zoom: range.map((x) => Number(x.toFixed(2))).join("_") });
  }

  /** Open the stored trajectories that are nearest to a step, of the first of the chart's runs that has some. */
  async pick(step, runs) {
    if (step === undefined) return;
    const run = runs.find((r) => r.files) || runs[0];
    const { files } = await source.files(run.id);
    const steps = files.map((file) => file.step).filter(format.isNumber);
    if (!steps.length) return this.app.notify("This run has no stored trajectories.");
    const near = steps.reduce((a, b) => (Math.abs(b - step) < Math.abs(a - step) ? b : a));
    if (near !== step) this.app.notify(`Step ${step} has no stored trajectories; this is step ${near}.`);
    route.go("browse", { run: run.id, step: near });
  }

  showMessage(text) {
    this.note.hidden = !text;
    this.note.textContent = text;
  }

  async changed(run) {
    try {
      await this.store.again(run, KEYS); // nothing was requested of a new run yet
      await this.needFound();
      this.draw();
    } catch (error) {
      this.draw();
      this.showMessage(error.message);
    }
  }

  close() {
    this.charts.forEach((chart) => chart.close());
  }
}
