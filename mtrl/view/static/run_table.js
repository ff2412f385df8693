/* Table of the runs: their names, progress, results and differences. */

import { source } from "./data.js";
import * as dom from "./dom.js";
import * as format from "./format.js";
import * as keys from "./keys.js";
import * as route from "./route.js";
import * as visible from "./visible.js";

const { h } = dom;
const MOST_DIFFERENCES = 8;

export function runTable(app, store) {
  const differing = app.differing.filter((key) => !["seed", "name"].includes(key));
  const columns = differing.slice(0, MOST_DIFFERENCES);
  const head = ["Run", "Seed", "Status", "Step", "Success before → after", "Reward", "Time", "Findings",
    ...columns.map((key) => key.split(".").slice(-2).join("."))];
  const table = h("table", {}, h("thead", {}, h("tr", {},
    head.map((title, i) => h("th", { scope: "col", title: i > 7 ? columns[i - 8] : null }, visible.plain(title))),
    h("th", { scope: "col" }, h("span", { class: "sr" }, "Open")))),
    h("tbody", {}, app.runs.map((run) => row(run, store, columns))));
  const more = differing.slice(MOST_DIFFERENCES).map(visible.plain), rest = more.length;
  const problem = (run, text) => dom.note(`${visible.plain(run.name)}: ${visible.plain(text)}`, "error");
  return h("section", { class: "card runs", "aria-label": "Runs" },
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of the runs" }, table),
    rest > 0 ? h("p", { class: "dim" },
      `${format.plural(rest, "more setting")} differ${rest === 1 ? "s" : ""}: ${more.join(", ")}`) : null,
    app.runs.flatMap((run) => run.problems.map((text) => problem(run, text))),
    app.warnings.map((text) => dom.note(visible.plain(text), "error")));
}

function row(run, store, columns) {
  const cell = (content, name = "") => h("td", { class: name }, content);
  return h("tr", {},
    h("th", { scope: "row" }, h("a", { href: route.link("browse", { run: run.id }) }, visible.plain(run.name)),
      h("small", { class: "path", title: visible.plain(run.path) }, visible.plain(run.path))),
    cell(format.value(run.seed), "num"), cell(h("span",
      { class: `badge ${run.status === "running" ? "live" : run.status}` }, visible.plain(run.status))),
    cell(run.max_steps ? `${format.number(run.step)} / ${format.number(run.max_steps)}` : format.number(run.step),
      "num"),
    cell(success(run, store)), cell(reward(run, store), "num"), cell(format.seconds(time(run)), "num"),
    cell(run.alarms ? h("a", { class: "alarm-count", href: "#overview", onclick: (event) => toAlarms(event) },
      String(run.alarms)) : "none", "num"),
    columns.map((key) => cell(format.value(run.differences[key]))),
    cell([h("a", { href: route.link("browse", { run: run.id, verdict: "disagree" }),
      title: "Trajectories on which reward and score disagree" }, "reward ≠ score"), " ",
      h("button", { type: "button", class: "quiet", id: `config-${run.id}`, onclick: () => showConfig(run) }, "config"),
    ], "links"));
}

function toAlarms(event) {
  event.preventDefault();
  document.querySelector(".alarms")?.scrollIntoView();
}

/** The summary of a run that has ended; a resumed run keeps that of its earlier end for a while. */
function end({ summary, status, step }) {
  return status === "running" || step > summary?.steps ? null : summary;
}

function time(run) {
  const seconds = end(run)?.seconds;
  if (format.isNumber(seconds)) return seconds;
  if (run.status !== "running") return null; // the file times of a copied run are those of the copy
  return format.isNumber(run.started) && format.isNumber(run.updated) ? run.updated - run.started : null;
}

/** Success on held-out rows by the scorer, at the first and the last evaluation, with the interval of the last. */
function success(run, store) {
  const of = (key, which) => store[which](run.id, key), summary = end(run);
  const before = summary?.success_before ?? of("val/success/mean", "first"),
    after = summary?.success_after ?? of("val/success/mean", "last");
  if (!format.isNumber(before) && !format.isNumber(after)) return h("span", { class: "dim" }, "not evaluated");
  const low = of("val/success/ci_low", "last"), high = of("val/success/ci_high", "last");
  const known = format.isNumber(low) && format.isNumber(high);
  const interval = known ? ` (${format.percent(low)} – ${format.percent(high)})` : "";
  const twice = summary || store.count(run.id, "val/success/mean") > 1;
  return h("span", { class: "before-after" }, h("span", { class: "dim" }, twice ? format.percent(before) : ""),
    h("span", {}, twice ? " → " : ""), h("b", {}, format.percent(after)), h("small", {}, interval),
    h("span", { class: "gauge", "aria-hidden": "true", vars: { "--low": low ?? after ?? 0,
      "--high": high ?? after ?? 0, "--before": before ?? 0, "--after": after ?? 0 } }, h("i", { class: "between" }),
      twice ? h("i", { class: "was" }) : null, h("i", { class: "is" })));
}

function reward(run, store) {
  return format.number(end(run)?.reward_after ?? store.last(run.id, "val/reward/mean") ?? store.last(run.id,
    "rollout/reward/mean"));
}

async function showConfig(run) {
  const field = h("input", { type: "search", class: "search", placeholder: "Find a key or value",
    "aria-label": "Find a key or value" });
  const text = h("pre", { class: "text config" }, "Reading…");
  keys.showDialog(`Configuration of ${visible.plain(run.name)}`, h("p", { class: "dim" }, visible.plain(run.path)),
    field, text);
  try {
    const { flat, text: yaml } = await source.config(run.id);
    const show = () => {
      const words = field.value.toLowerCase(), fits = (line) => line.toLowerCase().includes(words);
      const settings = Object.entries(flat).map(([key,
        value]) => `${key} = ${typeof value === "string" ? value : JSON.stringify(value)}`).filter(fits);
      // YAML may write a value in another way, such as 1.0e-05.
      const found = settings.length ? settings : yaml.split("\n").filter(fits);
      dom.replace(text,
        words ? visible.nodes(found.join("\n") || "No key or value contains this text.") : visible.nodes(yaml));
    };
    field.addEventListener("input", show);
    show();
  } catch (error) {
    dom.replace(text, error.message);
  }
}
