/* Lists of steps, groups and trajectories. */

import * as dom from "./dom.js";
import { Filters } from "./filters.js";
import { GroupList } from "./group_list.js";
import { Results } from "./results.js";
import * as route from "./route.js";
import { StepTable } from "./steps.js";

const { h } = dom;
const LEVELS = { __proto__: null, steps: StepTable, groups: GroupList, trajectories: Results };

/** A search field and filters beside one of three lists, which have open(run, values), changed(), keys(), close(). */
export class Browse {
  constructor(app) {
    this.app = app;
    this.filters = new Filters();
    this.search = h("input", { type: "search", class: "search", placeholder: "Search the messages ( / )",
      "aria-label": "Search the text of all messages",
      onkeydown: (event) => event.key === "Enter" && this.submit() });
    this.search.addEventListener("search", () => this.submit());
    this.levels = h("div", { class: "segments", role: "group", "aria-label": "What is listed" });
    this.count = h("span", { class: "count", role: "status" });
    this.place = h("div", { class: "results" });
    this.element = h("section", { class: "browse", "aria-label": "Browse" }, this.filters.element,
      h("div", { class: "browse-main" }, h("div", { class: "toolbar" }, this.levels, this.search, this.count),
        this.place));
  }

  open(values) {
    this.values = values;
    this.run = this.app.run(values.run);
    const level = values.q ? "trajectories" : values.level in LEVELS ? values.level : "trajectories";
    if (document.activeElement !== this.search) this.search.value = values.q || "";
    dom.replace(this.levels, Object.keys(LEVELS).map((name) => h("button", {
      type: "button", id: `level-${name}`, "aria-pressed": String(name === level),
        onclick: () => route.change({ level: name, q: null }),
    }, name[0].toUpperCase() + name.slice(1))));
    if (!(this.list instanceof LEVELS[level])) {
      if (this.list) this.list.close();
      this.list = new LEVELS[level](this.app, (text) => this.showCount(text));
      dom.replace(this.place, this.list.element);
    }
    this.filters.open(this.run, values, level);
    this.list.open(this.run, values);
  }

  showCount(text) {
    if (this.count.textContent !== text) this.count.textContent = text;
  }

  submit() {
    const q = this.search.value.trim();
    if (q !== (route.read().values.q || "")) route.change({ q: q || null, level: null });
  }

  changed(run, names) {
    if (run !== this.run.id || !names.includes("files")) return;
    this.run = this.app.run(run);
    this.filters.changed();
    this.list.changed();
  }

  keys() {
    return this.list.keys();
  }

  close() {
    this.list.close();
  }
}
