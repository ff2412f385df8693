/* List of the steps of a run, with one row per file of trajectories. */

import { source } from "./data.js";
import * as dom from "./dom.js";
import * as format from "./format.js";
import { VirtualList } from "./list.js";
import * as route from "./route.js";
import { bar, counted } from "./summary.js";

const { h } = dom;
const odd = (count) => (count ? h("b", { class: "odd" }, format.number(count)) : h("span", { class: "dim" }, "·"));
const COLUMNS = [
  ["c-step", "Step", (f) => format.number(f.step)],
  ["c-kind", "Kind", (f) => format.words(f.kind)],
  ["c-num", "Count", (f) => format.number(f.count)],
  ["c-mean", "Mean reward", (f, most) => [bar(f.reward_mean, most), format.fixed(f.reward_mean)]],
  ["c-mean", "Success", (f) => [bar(f.success_frac, 1), format.percent(f.success_frac)]],
  ["c-num", "Lenient", (f) => odd(f.lenient)],
  ["c-num", "Strict", (f) => odd(f.strict)],
  ["c-num", "Failed", (f) => odd(f.failed)],
  ["c-num", "Cut", (f) => odd(f.truncated)],
  ["c-num", "Turns", (f) => format.fixed(f.turns_mean, 1)],
  ["c-num", "Tokens", (f) => format.fixed(f.tokens_mean, 0)],
];

export class StepTable {
  constructor(app, showCount) {
    this.showCount = showCount;
    this.files = [];
    const head = h("div", { class: "vl-head", role: "row" },
      COLUMNS.map(([name, title]) => h("span", { class: name, role: "columnheader" }, title)));
    this.list = new VirtualList({ head, row: (i) => this.row(i), open: (i) => this.show(i), label: "Steps" });
    this.list.element.classList.add("steps");
    this.element = h("div", { class: "fill" }, this.list.element);
  }

  open(run, values) {
    this.run = run;
    this.values = values;
    this.load();
  }

  close() {
    this.list.close();
  }

  changed() {
    this.load();
  }

  async load() {
    const { run, values } = this;
    try {
      const answer = await source.files(run.id);
      if (run !== this.run || values !== this.values) return;
      const shown = answer.files.filter((file) => this.fits(file)).reverse();
      this.showCount(counted(shown.length, answer.indexing, "file", "files"));
      if (!shown.length) return dom.replace(this.element,
        dom.note(answer.files.length ? "No step passes these filters." : "This run has stored no trajectories yet."));
      if (!this.list.element.isConnected) dom.replace(this.element, this.list.element);
      const more = this.files.length ? shown.length - this.files.length : 0;
      this.files = shown;
      this.most = Math.max(...shown.map((file) => Math.abs(file.reward_mean || 0)));
      if (more > 0 && this.list.moved()) this.list.shift(more);
      this.list.show(shown.length, this.list.selected, true);
    } catch (error) {
      dom.replace(this.element, dom.note(error.message, "error"));
    }
  }

  /** Only the filters kind and step apply to whole files. */
  fits(file) {
    const { kind, step } = this.values;
    const [from, to = from] = (step || "").split("-").map(Number);
    return (!kind || kind.split(",").includes(file.kind))
      && (!step || (file.step !== null && file.step >= from && file.step <= to));
  }

  row(index) {
    const file = this.files[index];
    return h("div", { title: file.problem || null },
      COLUMNS.map(([name, , cell], i) => h("span", { class: name, role: "gridcell" },
      i === 0 ? h("a", { href: this.link(file), tabindex: -1 }, cell(file)) : cell(file, this.most))));
  }

  link(file) {
    return route.link("browse", { ...route.listValues(this.values), run: this.run.id, level: "groups", step: file.step,
      kind: file.kind });
  }

  show(index) {
    location.hash = this.link(this.files[index]);
  }

  keys() {
    return this.list ? this.list.keys() : {};
  }
}
