/* View of sweeps: their jobs as lines through the differing settings, and as a table with the best first. */

import { source } from "./data.js";
import * as dom from "./dom.js";
import * as format from "./format.js";
import { Parallel } from "./parallel.js";
import * as route from "./route.js";
import * as visible from "./visible.js";

const { h } = dom;
const BADGES = { __proto__: null, running: "live", finished: "finished", pruned: "pruned", failed: "failed" };
const NEWS = ["metrics", "status", "job"];

export class SweepView {
  constructor(app) {
    this.app = app;
    this.element = h("section", { class: "sweeps", "aria-label": "Sweeps" }, dom.note("Reading…"));
  }

  async open() {
    try {
      const { sweeps } = await source.sweeps();
      if (this.closed) return;
      this.parts?.forEach((part) => part.close());
      this.parts = sweeps.map((sweep) => new SweepPart(sweep));
      dom.replace(this.element, sweeps.length ? this.parts.map((part) => part.element)
        : dom.note("None of these runs is a job of a sweep; start one with mtrl train -m seed=0,1."));
    } catch (error) {
      dom.replace(this.element, dom.note(error.message, "error"));
    }
  }

  changed(run, names) {
    if (!names.some((name) => NEWS.includes(name)) || this.waiting) return;
    this.waiting = setTimeout(() => {
      this.waiting = null;
      this.open();
    }, 1500);
  }

  close() {
    this.closed = true;
    clearTimeout(this.waiting);
    this.parts?.forEach((part) => part.close());
  }

  keys() {
    return {};
  }
}

class SweepPart {
  constructor(sweep) {
    this.sweep = sweep;
    this.picture = new Parallel(sweep, (number) => this.point(number));
    this.rows = new Map(sweep.jobs.map((job) => [job.number, this.row(job)]));
    const name = visible.plain(sweep.name);
    this.element = h("section", { class: "card sweep", "aria-label": `Sweep ${name}` },
      h("h2", {}, name, h("small", { class: "dim" }, this.counts())), this.best(),
      sweep.keys.length && sweep.jobs.length > 1 ? this.picture.element : null, this.table(), this.seeds());
  }

  close() {
    this.picture.close();
  }

  counts() {
    const counted = new Map();
    for (const job of this.sweep.jobs) counted.set(job.status, (counted.get(job.status) || 0) + 1);
    return ` ${[...counted].map(([status, count]) => `${count} ${visible.plain(status)}`).join(", ")}`;
  }

  best() {
    const { best, objective } = this.sweep;
    if (!best) return h("p", { class: "dim" }, `No job has finished with a ${visible.plain(objective)} yet.`);
    return h("p", { class: "best" }, `Best: job ${best.number}. Repeat it with `,
      h("code", {}, visible.plain(best.command)));
  }

  table() {
    const { keys, objective, jobs } = this.sweep;
    const head = ["Job", ...keys.map(brief), objective, "Steps", "Time", "Status"];
    return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of the jobs" },
      h("table", {}, h("thead", {}, h("tr", {}, head.map((title, i) => h("th", { scope: "col",
        title: i > 0 && i <= keys.length ? keys[i - 1] : null }, visible.plain(title))))),
        h("tbody", {}, jobs.map((job) => this.rows.get(job.number)))));
  }

  row(job) {
    const { keys, best } = this.sweep, name = `job ${job.number}`;
    const badge = h("span", { class: `badge ${BADGES[job.status] || "stopped"}` }, visible.plain(job.status));
    const reason = job.said ? h("small", { class: "reason", title: visible.plain(job.said) },
      visible.plain(job.said)) : null;
    return h("tr", { class: best && best.number === job.number ? "is-best" : null,
      onmouseenter: () => this.point(job.number), onmouseleave: () => this.point(null) },
      h("th", { scope: "row" }, job.run ? h("a", { href: route.link("browse", { run: job.run }) }, name) : name),
      keys.map((key) => h("td", {}, rounded(job.settings[key] ?? format.missing))),
      h("td", { class: "num" }, format.number(job.value)),
      h("td", { class: "num" }, `${format.number(job.steps)} / ${format.number(job.max_steps)}`),
      h("td", { class: "num" }, format.seconds(job.seconds)), h("td", {}, badge, reason));
  }

  seeds() {
    const { seeds, objective } = this.sweep;
    if (!seeds.length) return null;
    const keys = Object.keys(seeds[0].settings);
    const head = [...keys.map(brief), `Mean ${objective}`, "±", "Seeds"];
    return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Means over seeds" },
      h("table", {}, h("thead", {}, h("tr", {}, head.map((title) => h("th", { scope: "col" }, visible.plain(title))))),
        h("tbody", {}, seeds.map((family) => h("tr", {},
          keys.map((key) => h("td", {}, rounded(family.settings[key]))),
          [family.mean, family.deviation, family.count].map((x) => h("td", { class: "num" }, format.number(x))))))));
  }

  /** Highlight a job in the picture and in the table. */
  point(number) {
    this.picture.point(number);
    for (const [other, row] of this.rows) row.classList.toggle("pointed", other === number);
  }
}

/** The last two parts of a key. */
function brief(key) {
  return key.split(".").slice(-2).join(".");
}

/** A setting as text; a value from a sampler is rounded, because it has too many digits. */
function rounded(text) {
  return /^-?(?=[\d.]{9})\d*\.\d+(e-?\d+)?$/.test(text) ? format.number(Number(text)) : visible.plain(text);
}
