/* Live updates of the runs: the page requests changes once a second while it is visible. */

import { source } from "./data.js";

const EVERY = 1000; // milliseconds
const WATCHED = ["metrics", "files", "alarms", "timeline", "status", "job"];

export class Live {
  constructor(app) {
    this.app = app;
    this.state = undefined;
    this.known = new Map();
  }

  /** Record the state of the runs before the first view is shown, so that later writes count as changes. */
  async begin() {
    const answer = await source.changes();
    this.state = answer.state;
    answer.runs.forEach((run) => this.known.set(run.id, run));
  }

  start() {
    this.timer = setTimeout(() => this.look(), EVERY);
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) this.look();
    });
  }

  async look() {
    clearTimeout(this.timer);
    if (this.looking) return;
    this.looking = true;
    try {
      const answer = await source.changes(this.state);
      if (this.app.silent) this.heard();
      if (answer.state !== this.state) await this.notify(answer);
      this.state = answer.state;
    } catch {
      if (!this.app.silent) this.lost();
    }
    this.looking = false;
    if (!document.hidden) this.timer = setTimeout(() => this.look(), this.app.silent ? 3 * EVERY : EVERY);
  }

  /** Notify the current view which parts of which run changed. */
  async notify(answer) {
    const news = answer.runs.map((run) => [run, this.difference(run)]).filter(([, names]) => names.length);
    answer.runs.forEach((run) => this.known.set(run.id, run));
    await this.app.readRuns();
    if (this.app.view && this.app.runs.length) this.app.drawBar();
    else this.app.follow();
    for (const [run, names] of news) {
      source.forget(run.id);
      if (this.app.view) this.app.view.changed(run.id, names);
    }
  }

  difference(run) {
    const before = this.known.get(run.id);
    const names = WATCHED.filter((name) => !before || before[name] !== run[name]);
    const moved = !before || JSON.stringify(before.indexing) !== JSON.stringify(run.indexing);
    return moved && !names.includes("files") ? [...names, "files"] : names;
  }

  lost() {
    this.app.silent = true;
    this.app.drawBar();
  }

  heard() {
    this.app.silent = false;
    this.app.drawBar();
  }
}
