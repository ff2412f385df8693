/* List of the groups: one row per prompt, with one cell per trajectory. */

import { source } from "./data.js";
import * as dom from "./dom.js";
import * as format from "./format.js";
import { VirtualList } from "./list.js";
import { Pages } from "./pages.js";
import * as route from "./route.js";
import { counted } from "./summary.js";
import * as visible from "./visible.js";

const { h } = dom;
const SORTS = [["newest", "Newest"], ["reward_mean", "Mean reward"], ["reward_std", "Spread of rewards"],
  ["successes", "Successes"], ["disagreements", "Disagreements"], ["size", "Size"]];

export class GroupList {
  constructor(app, showCount) {
    this.showCount = showCount;
    this.element = h("div", { class: "fill" });
  }

  open(run, values) {
    const sort = SORTS.some(([name]) => name === values.group_sort) ? values.group_sort : "newest";
    const key = JSON.stringify([run.id, route.filters(values), sort]);
    this.run = run;
    this.values = values;
    if (key === this.key) return;
    this.key = key;
    this.close();
    this.query = { ...route.filters(values), sort };
    this.model = new Pages((part) => source.groups(run.id, { ...this.query, ...part }),
      (moved) => this.draw(moved), (g) => route.place(g.file, g.group));
    this.model.anchor = () => this.list.selected;
    this.list = new VirtualList({ head: this.head(sort), row: (i) => this.row(i), open: (i) => this.show(i),
      label: "Groups" });
    this.list.element.classList.add("groups");
    this.placed = false;
    this.model.get(0);
    this.draw();
  }

  close() {
    if (this.list) this.list.close();
  }

  head(sort) {
    const choice = h("select", { "aria-label": "Sort the groups by",
      onchange: (event) => route.change({ group_sort: event.target.value === "newest" ? null : event.target.value }) },
      SORTS.map(([name, text]) => h("option", { value: name, selected: name === sort }, text)));
    return h("div", { class: "vl-head", role: "row" },
      ["Step", "Kind", "Task"].map((title) => h("span", { class: `c-${title.toLowerCase()}`, role: "columnheader" },
        title)),
      h("span", { class: "c-mean", role: "columnheader" }, "Reward ± std"),
        h("span", { class: "c-score", role: "columnheader" }, "Solved"),
      h("span", { class: "c-members", role: "columnheader" }, "Trajectories: reward (mark: score) ", choice));
  }

  /** Draw the list, whose rows have moved by `moved`; those that are visible stay where they are. */
  draw(moved = 0) {
    const { total, error, indexing } = this.model;
    if (moved && this.placed && this.list.moved()) this.list.shift(moved);
    if (error && total === null) return dom.replace(this.element, dom.note(error.message, "error"));
    this.showCount(error ? error.message : counted(total, indexing, "group", "groups"));
    if (total === null) return dom.replace(this.element, dom.note("Reading the groups…", "loading"));
    if (!total) return dom.replace(this.element, dom.note("No group passes these filters."));
    if (!this.list.element.isConnected) dom.replace(this.element, this.list.element);
    this.list.show(total, this.placed ? this.list.selected : 0, this.placed);
    this.placed = true;
  }

  row(index) {
    const g = this.model.get(index);
    if (!g) return h("div", { class: "waiting" }, h("span", { role: "gridcell" }, "…"));
    const cell = (name, ...content) => h("span", { class: name, role: "gridcell" }, content);
    const flat = g.informative === false ? "All advantages are 0: the policy learns nothing from this group" : null;
    return h("div", { class: flat ? "flat" : "", title: flat }, cell("c-step", format.number(g.step)),
      cell("c-kind", format.words(g.kind)),
      cell("c-task", h("a", { href: this.link(g), tabindex: -1 }, visible.line(g.task, 60))),
      cell("c-mean", `${format.fixed(g.reward_mean)} ± ${format.fixed(g.reward_std)}`),
      cell("c-score", g.scored ? `${g.successes}/${g.scored}` : format.missing),
      cell("c-members", g.members.map((s) => this.member(s))));
  }

  member(s) {
    const at = route.link("trajectory", { ...route.listValues(this.values), run: this.run.id,
      at: route.place(s.file, s.line) });
    const odd = s.verdict && s.verdict !== "agree" ? `, ${s.verdict}` : "";
    const verdict = `reward ${format.number(s.reward)}, score ${format.number(s.score)}`;
    const about = `#${s.index}: ${verdict}, ${format.words(s.stop)}${odd}`;
    const share = format.isNumber(s.reward) ? Math.max(0, Math.min(1, s.reward)) : 0;
    return h("a", { class: `member ${s.verdict || ""} ${s.failed ? "failed" : ""} ${s.reward < 0 ? "below" : ""}`,
      href: at, title: about, "aria-label": about, tabindex: -1, vars: { "--share": share } },
      format.fixed(s.reward, 1), s.success === true ? h("b", { "aria-hidden": "true" }, "✓") : null);
  }

  link(g) {
    return route.link("group", { ...route.listValues(this.values), run: this.run.id,
      of: route.place(g.file, g.group) });
  }

  show(index) {
    const g = this.model.get(index);
    if (g) location.hash = this.link(g);
  }

  changed() {
    this.model.stale();
    this.model.get(this.list.selected); // even if no row is shown
    this.draw();
  }

  keys() {
    return this.list ? this.list.keys() : {};
  }
}
