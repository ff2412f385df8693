/* Filters of the lists: presets on top, then all existing values with their counts. */

import { source } from "./data.js";
import * as dom from "./dom.js";
import * as format from "./format.js";
import * as route from "./route.js";
import * as visible from "./visible.js";

const { h } = dom;
const PRESETS = [
  ["all", "All", {}, "Everything"],
  ["disagree", "Reward ≠ score", { verdict: "disagree" }, "The reward and the scorer do not agree on success"],
  ["lenient", "Lenient", { verdict: "lenient" },
    "Solved by the reward and not by the scorer: a hacked or lenient reward"],
  ["strict", "Strict", { verdict: "strict" },
    "Solved by the scorer and not by the reward: a reward that is too strict"],
  ["unsolved", "Unsolved", { success: "0" }, "Not solved by the scorer"],
  ["failed", "Failed", { failed: "1" }, "Errors, timeouts, aborted episodes, unreadable lines"],
  ["truncated", "Truncated", { truncated: "1" }, "Cut by a token or context limit"],
  ["longest", "Longest", { sort: "tokens" }, "Most sampled tokens first"],
];
const CHOICES = ["verdict", "success", "failed", "truncated"];
const NONE = Object.fromEntries([...CHOICES, "sort", "order"].map((key) => [key, null]));

/** The filters only change the address; the lists read them from the address. */
export class Filters {
  constructor() {
    this.presets = h("div", { class: "presets", role: "group", "aria-label": "Presets" });
    this.facets = h("div", { class: "facets" });
    this.element = h("details", { class: "filters", open: matchMedia("(min-width: 900px)").matches },
      h("summary", {}, "Filters ", h("span", { class: "active-filters" })), this.presets, this.facets);
  }

  open(run, values, level) {
    this.level = level;
    const key = JSON.stringify([run.id, route.filters(values)]);
    this.values = values;
    this.run = run;
    this.drawPresets();
    const active = Object.keys(route.filters(values)).length;
    this.element.querySelector(".active-filters").textContent = active ? `(${active})` : "";
    if (key !== this.key) this.load(key);
  }

  changed() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.typing() || this.load(this.key), 400);
  }

  async load(key) {
    this.key = key;
    try {
      const found = await this.counted();
      if (key === this.key) this.draw(found);
    } catch (error) {
      dom.replace(this.facets, dom.note(error.message, "error"));
    }
  }

  /** Whether the user is typing into a field, which must not be redrawn. */
  typing() {
    const active = document.activeElement;
    return this.facets.contains(active) && active.matches("input:not([type=checkbox])");
  }

  /** Counts under all filters; for the tick boxes, counts without their own filter. */
  async counted() {
    const chosen = route.filters(this.values);
    const without = (key) => (chosen[key] ? source.facets(this.run.id, { ...chosen, [key]: undefined }) : null);
    const [all, kinds, stops] = await Promise.all([source.facets(this.run.id, chosen), without("kind"),
      without("stop")]);
    return { ...all, kinds: (kinds || all).kinds, stops: (stops || all).stops };
  }

  drawPresets() {
    const now = this.values, groups = this.level === "groups"; // which have orders of their own
    const longest = now.sort === "tokens" && !groups ? "tokens" : "";
    const same = (change) => CHOICES.every((key) => (change[key] || "") === (now[key] || ""))
      && (change.sort || "") === longest;
    const offered = PRESETS.filter(([, , change]) => !(change.sort && groups));
    dom.replace(this.presets, offered.map(([id, label, change, about]) => h("button", {
      type: "button", class: "chip", id: `preset-${id}`, title: about, "aria-pressed": String(same(change)),
      onclick: () => route.change({ ...NONE, ...change, level: this.level === "steps" ? null : this.level }),
    }, label)));
  }

  draw(found) {
    dom.replace(this.facets,
      this.several("Kind", "kind", found.kinds),
      this.steps(found.steps),
      this.several("Why it ended", "stop", found.stops, format.words),
      this.tasks(found),
      this.range("Reward", "reward_min", "reward_max"),
      this.range("Turns", "turns_min", "turns_max"),
      Object.keys(route.filters(this.values)).length ? h("button",
        { type: "button", class: "button", id: "clear-filters",
        onclick: () => route.change(Object.fromEntries(route.FILTERS.map((key) => [key, null]))) },
          "Clear all filters") : null);
  }

  /** Tick boxes, whose values are joined by commas in the address. Chosen values are listed even with a count of 0. */
  several(title, key, items, name = visible.plain) {
    const chosen = (this.values[key] || "").split(",").filter(Boolean);
    const missing = chosen.filter((value) => !items.some((i) => i.value === value)).map((value) => ({ value,
      count: 0 }));
    const all = [...items, ...missing].filter(({ value }) => value); // an unreadable line has no stop reason
    if (!all.length) return null;
    return h("fieldset", {}, h("legend", {}, title), all.map(({ value, count }) => h("label", { class: "tick" },
      h("input", { type: "checkbox", id: `${key}-${visible.plain(value)}`, checked: chosen.includes(value),
        onchange: (event) => {
        const next = event.target.checked ? [...chosen, value] : chosen.filter((v) => v !== value);
        route.change({ [key]: next.join(",") || null });
      } }), h("span", { class: "tick-name" }, name(value)), h("span", { class: "num" }, format.number(count)))));
  }

  steps(items) {
    const [from, to] = (this.values.step || "").split("-");
    const set = (a,
      b) => route.change({ step: a === "" && b === "" ? null : b === "" || a === b ? a || b : `${a || 0}-${b}` });
    const low = h("input", { type: "number", id: "step-from", min: 0, value: from || "",
      placeholder: items.length ? items[0].value : "first", "aria-label": "First step" });
    const high = h("input", { type: "number", id: "step-to", min: 0, value: to === undefined ? from || "" : to,
      placeholder: items.length ? items.at(-1).value : "last", "aria-label": "Last step" });
    low.addEventListener("change", () => set(low.value,
      high.value || String(items.length ? items.at(-1).value : low.value)));
    high.addEventListener("change", () => set(low.value, high.value));
    return h("fieldset", {}, h("legend", {}, "Step"), h("div", { class: "range" }, low, "to", high));
  }

  tasks(found) {
    const field = h("input", { type: "text", id: "task", list: "task-names",
      value: this.values.task || this.values.contains || "",
      placeholder: `${format.plural(found.tasks_total, "task")}`, "aria-label": "Task: its id or a part of it",
        autocomplete: "off" });
    field.addEventListener("change", () => {
      const text = field.value.trim(), whole = found.tasks.some((t) => t.value === text);
      route.change({ task: whole ? text : null, contains: whole ? null : text || null });
    });
    const options = found.tasks.map((t) => h("option", { value: t.value },
      `${t.count}×, reward ${format.number(t.reward_mean)}`));
    return h("fieldset", {}, h("legend", {}, "Task"), field, h("datalist", { id: "task-names" }, options));
  }

  range(title, low, high) {
    const field = (key, text) => h("input", { type: "number", step: "any", id: key, value: this.values[key] || "",
      placeholder: text,
      "aria-label": `${title}, ${text}`, onchange: (event) => route.change({ [key]: event.target.value || null }) });
    return h("fieldset", {}, h("legend", {}, title), h("div", { class: "range" }, field(low, "least"), "to",
      field(high, "most")));
  }
}
