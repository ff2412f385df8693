/* Overview of the runs: the table, the findings of the diagnosis, the curves, the timeline. */

import { Alarms } from "./alarms.js";
import { Curves } from "./curves.js";
import * as dom from "./dom.js";
import { Gantt } from "./gantt.js";
import { MetricStore } from "./metrics.js";
import { runTable } from "./run_table.js";

const { h } = dom;
const PAUSE = 1500; // minimum milliseconds between two redraws for a run that writes fast

export class Overview {
  constructor(app) {
    this.app = app;
    this.store = new MetricStore();
    this.table = h("div", {});
    this.alarms = new Alarms(app);
    this.curves = new Curves(app, this.store);
    this.gantt = new Gantt(app);
    this.waiting = new Map();
    this.element = h("section", { class: "overview", "aria-label": "Overview" }, this.table, this.alarms.element,
      this.curves.element, this.gantt.element);
  }

  async open(values) {
    this.values = values;
    this.drawTable();
    if (!this.opened) this.alarms.open();
    this.opened = true;
    this.gantt.open(values);
    await this.curves.open(values);
    this.drawTable();
  }

  drawTable() {
    const along = this.table.querySelector(".scroll")?.scrollLeft;
    dom.replace(this.table, runTable(this.app, this.store));
    if (along) this.table.querySelector(".scroll").scrollLeft = along;
  }

  changed(run, names) {
    if (names.includes("alarms")) this.alarms.open();
    if (names.includes("timeline")) this.later(`${run}/timeline`,
      () => this.gantt.run ? this.gantt.changed(names) : this.gantt.open(this.values));
    if (names.includes("metrics")) this.later(run, () => this.curves.changed(run).then(() => this.drawTable()));
    this.drawTable();
  }

  /** Run an action at once, or at the end of the pause, so that a fast run is redrawn at most once per pause. */
  later(key, act) {
    if (this.waiting.has(key)) return;
    this.waiting.set(key, setTimeout(() => {
      this.waiting.delete(key);
      act();
    }, this.hurry ? PAUSE : 0));
    this.hurry = true;
  }

  close() {
    this.waiting.forEach(clearTimeout);
    this.curves.close();
    this.gantt.close();
  }

  keys() {
    return {};
  }
}
