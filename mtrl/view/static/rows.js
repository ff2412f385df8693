/* View of the training rows of a run: how often they succeed over time, and the hardest and the easiest rows. */

import { source } from "./data.js";
import * as dom from "./dom.js";
import * as format from "./format.js";
import * as route from "./route.js";
import * as visible from "./visible.js";

const { h } = dom;
const PAUSE = 1500; // minimum milliseconds between two redraws for a run that writes fast

export class RowsView {
  constructor(app) {
    this.app = app;
    this.element = h("section", { class: "rows-view", "aria-label": "Rows" }, dom.note("Reading…"));
  }

  async open(values) {
    const run = this.run = this.app.run(values.run);
    try {
      const { sources, problems } = await source.rows(run.id);
      if (this.closed || run !== this.run) return;
      dom.replace(this.element, problems.map((problem) => dom.note(visible.plain(problem), "error")),
        sources.length ? sources.map((one) => card(run, one)) : dom.note("This run has no results of rows yet."));
    } catch (error) {
      if (!this.closed) dom.replace(this.element, dom.note(error.message, "error"));
    }
  }

  changed(run, names) {
    if (run !== this.run.id || !names.includes("metrics") || this.waiting) return;
    this.waiting = setTimeout(() => {
      this.waiting = null;
      this.open({ run });
    }, PAUSE);
  }

  close() {
    this.closed = true;
    clearTimeout(this.waiting);
  }

  keys() {
    return {};
  }
}

function card(run, one) {
  const name = visible.plain(one.name || run.name);
  return h("section", { class: "card rows", "aria-label": `Rows of ${name}` },
    h("h2", {}, name, h("small", { class: "dim" }, ` ${visible.plain(one.sampler)}`)),
    h("p", {}, counts(one)),
    one.tried ? [overTime(one, name), h("div", { class: "ends" }, list(run, one.hardest, "Hardest rows"),
      list(run, one.easiest, "Easiest rows"))] : dom.note("No group on these rows has a result yet."));
}

/** Sentence with the numbers of rows. */
function counts(one) {
  const never = Math.max(0, one.rows - one.tried);
  const tried = `${format.plural(one.rows, "training row")}: ${format.number(one.tried)} with a result, ${
    format.number(never)} without one.`;
  if (!one.band) return tried;
  const [low, high] = one.band.map(format.percent);
  return `${tried} ${format.number(one.inside)} in the band from ${low} to ${high} of success, ${
    format.number(one.below)} below it (too hard), ${format.number(one.above)} above it (too easy).`;
}

/** Table with one line for each step: the rows with a result by their running success. */
function overTime(one, name) {
  const size = one.over_time[0].bins.length;
  const head = ["Step", ...one.over_time[0].bins.map((_, i) => `${i * 100 / size}–${(i + 1) * 100 / size}\u2009%`),
    "In the band", "No result"];
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Running success of ${name} by step` },
    h("table", { class: "spread" }, h("thead", {}, h("tr", {}, head.map((title) => h("th", { scope: "col" }, title)))),
      h("tbody", {}, one.over_time.map((at) => h("tr", {}, h("th", { scope: "row" }, format.number(at.step)),
        at.bins.map((count) => h("td", { class: "num bin", vars: { "--share": String(count / Math.max(1, at.tried)) } },
          count ? format.number(count) : "·")),
        h("td", { class: "num" }, format.number(at.inside)),
        h("td", { class: "num" }, format.number(Math.max(0, one.rows - at.tried))))))));
}

/** Table of rows whose names lead to their trajectories. */
function list(run, rows, title) {
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title },
    h("table", {}, h("caption", {}, title), h("thead", {}, h("tr", {}, ["Row", "Success", "Groups", "Last step"].map(
      (text) => h("th", { scope: "col" }, text)))),
      h("tbody", {}, rows.map((row) => h("tr", {},
        h("th", { scope: "row" }, h("a", { href: route.link("browse", { run: run.id, task: row.id }) },
          visible.plain(row.id))),
        h("td", { class: "num" }, format.percent(row.success)), h("td", { class: "num" }, format.number(row.groups)),
        h("td", { class: "num" }, format.number(row.step)))))));
}
