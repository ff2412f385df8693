/* List of trajectories, with one row each and of any length. */

import * as dom from "./dom.js";
import * as format from "./format.js";
import { VirtualList } from "./list.js";
import { Found, listed } from "./pages.js";
import * as route from "./route.js";
import { counted, outcome, scoreCell, verdictMark } from "./summary.js";
import * as visible from "./visible.js";

const { h } = dom;
/** Columns: [class, title, sort key, cell]. */
const COLUMNS = [
  ["c-step", "Step", "newest", (s) => format.number(s.step)],
  ["c-kind", "Kind", null, (s) => h("span", { title: format.words(s.kind) }, format.words(s.kind))],
  ["c-task", "Task", null, (s) => [visible.line(s.task, 80), h("small", {}, ` #${s.index}`)]],
  ["c-num", "Reward", "reward", (s) => format.fixed(s.reward)],
  ["c-score", "Score", "score", scoreCell],
  ["c-verdict", "Verdict", "gap", verdictMark],
  ["c-stop", "Ended", null, outcome],
  ["c-num c-turns", "Turns", "turns", (s) => format.number(s.turns)],
  ["c-num", "Tokens", "tokens", (s) => format.number(s.tokens)],
  ["c-num c-adv", "Adv.", "advantage", advantage],
  ["c-num c-drift", "Drift", "drift", (s) => format.number(s.drift)],
];
const FOUND = [...COLUMNS.slice(0, 4), COLUMNS[5], ["c-hit", "Found", null, hit]];
const ABOUT = {
  newest: "Sort by step", gap: "Sort by |reward − score|",
    advantage: "Mean advantage of the sampled tokens; sort by it",
  drift: "Largest |trainer's − engine's log-prob|; sort by it", tokens: "Sampled tokens; sort by them",
};

function advantage(s) {
  if (!format.isNumber(s.advantage)) return format.missing;
  return h("span", { class: s.advantage > 0 ? "plus" : s.advantage < 0 ? "minus" : "" },
    (s.advantage > 0 ? "+" : "") + format.fixed(s.advantage));
}

function hit({ hits, hit_count: count }) {
  const [first] = hits;
  return [h("small", {}, `${first.turn ? `turn ${first.turn}` : "end"}, ${visible.plain(first.role)}: `),
    visible.snippet(first.before).slice(-32),
    h("mark", {}, visible.snippet(first.match)), visible.snippet(first.after),
      count > 1 ? h("small", {}, ` +${count - 1}`) : null];
}

export class Results {
  constructor(app, showCount) {
    this.app = app;
    this.showCount = showCount;
    this.element = h("div", { class: "fill" });
  }

  open(run, values) {
    this.run = run;
    this.values = values;
    const model = listed(run.id, values, (moved) => this.draw(moved));
    if (model === this.model) return;
    this.close();
    this.model = model;
    this.columns = values.q ? FOUND : COLUMNS;
    this.list = new VirtualList({ head: this.head(), row: (i) => this.row(i), open: (i) => this.show(i),
      label: "Trajectories" });
    this.list.element.classList.toggle("with-hits", Boolean(values.q));
    this.placed = false;
    model.anchor = () => (this.placed ? this.list.selected : model.at);
    model.get(model.at);
    this.draw();
  }

  close() {
    if (this.list) this.list.close();
  }

  /** Draw the list, whose rows have moved by `moved`; those that are visible stay where they are. */
  draw(moved = 0) {
    const { total, error } = this.model;
    if (moved && this.placed && this.list.moved()) this.list.shift(moved);
    const isSearch = this.model instanceof Found;
    if (error && (isSearch || total === null)) return dom.replace(this.element, dom.note(error.message, "error"));
    this.showCount(isSearch ? this.progress() : error ? error.message : counted(total, this.model.indexing));
    const waiting = total === null || (total === 0 && this.model instanceof Found && !this.model.done);
    if (waiting) return dom.replace(this.element, dom.note("Reading the trajectories…", "loading"));
    if (!total) return dom.replace(this.element, dom.note(this.nothing()));
    if (!this.list.element.isConnected) dom.replace(this.element, this.list.element);
    this.list.show(total, this.placed ? this.list.selected : this.model.at, this.placed);
    this.placed = true;
  }

  progress() {
    const { total, searched, of, done, missed } = this.model;
    const far = of === null ? "searching…" : `searching, ${format.number(searched)} of ${format.number(of)}…`;
    const late = missed ? `; ${format.number(missed)} were added meanwhile: search again to find them` : "";
    const how = (done ? `of ${format.number(of)} searched` : far) + late;
    return `found in ${format.plural(total, "trajectory", "trajectories")}, ${how}`;
  }

  nothing() {
    if (this.values.q) return "No message holds this text; the filters narrow the search, too.";
    if (Object.keys(route.filters(this.values)).length) return "No trajectory passes these filters.";
    return "This run has stored no trajectories yet; trainer.save_trajectories_every sets how often it stores them.";
  }

  head() {
    const { sort = "newest", order = "desc" } = this.values;
    return h("div", { class: "vl-head", role: "row" }, this.columns.map(([name, title, key]) => {
      const on = key === sort;
      const turn = () => route.change({ sort: key === "newest" ? null : key,
        order: on && order === "desc" ? "asc" : null });
      return h("span", { class: name, role: "columnheader",
        "aria-sort": on ? (order === "asc" ? "ascending" : "descending") : null },
        key && !this.values.q ? h("button", { type: "button", title: ABOUT[key] || `Sort by ${title.toLowerCase()}`,
          onclick: turn }, title, on ? (order === "asc" ? " ↑" : " ↓") : "") : title);
    }));
  }

  row(index) {
    const s = this.model.get(index);
    if (!s) return h("div", { class: "waiting" }, h("span", { role: "gridcell" }, "…"));
    return h("div", { dataset: { place: route.place(s.file, s.line) } },
      this.columns.map(([name, , , cell]) => h("span", { class: name, role: "gridcell" },
      name === "c-task" ? h("a", { href: this.link(s), tabindex: -1 }, cell(s)) : cell(s))));
  }

  link(s) {
    const hit = s.hits && s.hits[0];
    return route.link("trajectory", { ...route.listValues(this.values), run: this.run.id,
      at: route.place(s.file, s.line),
      turn: hit && hit.turn ? hit.turn : null });
  }

  show(index) {
    const s = this.model.get(index);
    if (!s) return;
    this.model.at = index;
    location.hash = this.link(s);
  }

  changed() {
    if (this.model instanceof Found) return;
    this.model.stale();
    this.model.get(this.list.selected); // even if no row is shown
    this.draw();
  }

  keys() {
    return this.list ? this.list.keys() : {};
  }
}
