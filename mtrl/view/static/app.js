/* Start of the page: the bar at the top, the view that the address names, the keys, and live updates of the runs. */

import { source } from "./data.js";
import * as dom from "./dom.js";
import * as format from "./format.js";
import * as keys from "./keys.js";
import { Live } from "./live.js";
import * as route from "./route.js";
import * as theme from "./theme.js";
import * as visible from "./visible.js";
import { Browse } from "./browse.js";
import { GroupView } from "./group.js";
import { Overview } from "./overview.js";
import { RowsView } from "./rows.js";
import { SweepView } from "./sweep.js";
import { TrajectoryView } from "./trajectory.js";

const { h } = dom;
const VIEWS = { __proto__: null, overview: Overview, browse: Browse, group: GroupView, trajectory: TrajectoryView,
  rows: RowsView, sweep: SweepView };
const TABS = [["overview", "Overview"], ["browse", "Browse"], ["rows", "Rows"], ["sweep", "Sweep"]];

/** State and functions that all views share. Views have open(values), close(), changed(run, names) and keys(). */
class App {
  runs = [];
  differing = [];
  warnings = [];
  view = null;

  async start() {
    theme.start();
    const skip = document.querySelector(".skip");
    skip.addEventListener("click", (event) => {
      event.preventDefault();
      dom.byId("main").focus();
    });
    const live = source.live ? new Live(this) : null;
    try {
      if (live) await live.begin();
      await this.readRuns();
    } catch (error) {
      return this.show(dom.note(error.message, "error"));
    }
    keys.start(this);
    route.start(() => this.follow());
    if (live) live.start();
  }

  async readRuns() {
    const answer = await source.runs();
    this.runs = answer.runs;
    this.differing = answer.differing;
    this.warnings = answer.warnings || [];
    this.sweeps = answer.sweeps;
    this.version = answer.version;
  }

  run(id) {
    return this.runs.find((run) => run.id === id) || this.runs[0];
  }

  /** Show the view that the address names. The same view stays; another view is created. Without runs there is none. */
  follow() {
    const { view, values } = route.read();
    if (!this.runs.length) {
      if (this.view) this.view.close();
      this.view = null;
      this.drawBar();
      return this.show(dom.note("There is no run here."));
    }
    const Kind = VIEWS[view] || Overview;
    if (!(this.view instanceof Kind)) {
      if (this.view) this.view.close();
      this.view = new Kind(this);
      this.show(this.view.element);
      window.scrollTo(0, 0);
    }
    this.drawBar();
    this.view.open(values);
  }

  show(element) {
    const main = dom.byId("main");
    main.removeAttribute("aria-busy");
    dom.replace(main, element);
  }

  drawBar() {
    if (!this.runs.length) return dom.replace(dom.byId("bar"));
    const { view, values } = route.read();
    const run = this.run(values.run);
    const on = ["overview", "rows", "sweep"].includes(view) ? view : "browse";
    const ofRun = ["browse", "rows"].includes(on);
    const linked = { __proto__: null, browse: route.listValues(values), rows: { run: values.run } };
    const tabs = TABS.filter(([name]) => this.has(name)).map(([name, label]) => h("a", {
      class: "tab", id: `tab-${name}`, href: route.link(name, linked[name] || {}),
        "aria-current": name === on ? "page" : null,
    }, label));
    dom.replace(dom.byId("bar"),
      h("a", { class: "brand", href: "#overview" }, "mtrl", h("span", {}, "view")),
      h("nav", { "aria-label": "Views" }, tabs),
      ofRun ? this.runChoice(run, on) : h("span", { class: "grow" }),
      this.badge(ofRun ? run : null),
      h("button", { type: "button", class: "quiet", id: "copy-link", title: "Copy the link to this view",
        onclick: () => this.copy() }, h("span", { class: "wide" }, "Copy "), "link"),
      theme.button(),
      h("button", { type: "button", class: "quiet", id: "help", title: "Keys (?)", "aria-label": "Help: the keys",
        onclick: () => keys.help() }, "?"));
    document.title = `${run.name} · mtrl view`;
  }

  /** Whether there is something to show in a view. */
  has(view) {
    return view === "sweep" ? this.sweeps : view !== "rows" || this.runs.some((run) => run.has_rows);
  }

  runChoice(run, view) {
    if (this.runs.length === 1) return h("span", { class: "run-name grow" }, visible.plain(run.name));
    const options = this.runs.map((r) => h("option", { value: r.id, selected: r === run },
      visible.plain(`${r.name} · ${r.path}`)));
    return h("label", { class: "run-choice grow" }, h("span", { class: "sr" }, "Run"),
      h("select", { id: "run", onchange: (event) => route.go(view, { run: event.target.value }) }, options));
  }

  /** Badge with one word: live, finished, stopped, empty, stalled or exported. */
  badge(run) {
    const shown = run ? [run] : this.runs;
    if (!source.live) return h("span", { class: "badge", title: "An exported file, which does not change" },
      "exported");
    const all = (status) => shown.every((r) => r.status === status);
    const over = all("finished") ? "finished" : all("empty") ? "empty" : "stopped";
    const state = !shown.some((r) => r.status === "running") ? over : this.silent ? "stalled" : "live";
    const latest = shown.map((r) => r.updated).filter(format.isNumber).reduce((a, b) => Math.max(a, b), 0);
    const when = latest ? `last written ${new Date(1000 * latest).toLocaleString()}` : "nothing was written yet";
    return h("span", { class: `badge ${state}`, id: "badge",
      title: this.silent ? "The server does not answer" : when }, state);
  }

  async copy() {
    try {
      await navigator.clipboard.writeText(location.href);
      this.notify("Link copied.");
    } catch {
      window.prompt("The link to this view:", location.href);
    }
  }

  /** Show a short message, also to screen readers. */
  notify(text) {
    dom.byId("notification").textContent = text;
    const toast = h("div", { class: "toast" }, text);
    document.body.append(toast);
    setTimeout(() => toast.remove(), 2500);
  }
}

new App().start();
