/* Findings of the live diagnosis: the symptom, its evidence, and the proposed changes. */

import { source } from "./data.js";
import * as dom from "./dom.js";
import * as format from "./format.js";
import * as route from "./route.js";
import * as visible from "./visible.js";

const { h } = dom;
const MARKS = { __proto__: null, alarm: "▲", warning: "◆", note: "●" };
const TONES = { alarm: "severe", warning: "warned", note: "" };
const list = (value) => (Array.isArray(value) ? value : []);

export class Alarms {
  constructor(app) {
    this.app = app;
    this.element = h("section", { class: "alarms", "aria-label": "Alarms", hidden: true });
  }

  async open() {
    try {
      const all = await Promise.all(this.app.runs.filter((run) => run.alarms).map(async (run) => [run,
        (await source.alarms(run.id)).alarms]));
      this.draw(all.flatMap(([run, alarms]) => latest(alarms).map((alarm) => [run, alarm])));
    } catch (error) {
      this.element.hidden = false;
      dom.replace(this.element, dom.note(error.message, "error"));
    }
  }

  draw(alarms) {
    this.element.hidden = !alarms.length;
    const several = this.app.runs.length > 1, first = !this.element.childElementCount;
    const open = new Set([...this.element.querySelectorAll("details[open]")].map((element) => element.dataset.key));
    dom.replace(this.element, h("h2", {}, "Diagnosis ", h("small", {}, format.plural(alarms.length, "finding"))),
      alarms.map(([run, alarm], i) => this.card(run, alarm, several, first ? i === 0 : open.has(key(run, alarm)))));
  }

  card(run, alarm, several, open) {
    const severity = alarm.severity in MARKS ? alarm.severity : "note";
    const [from, to] = list(alarm.steps);
    const range = from === to ? `step ${to}` : `steps ${from}–${to}`;
    const steps = format.isNumber(to) ? range : format.isNumber(alarm.step) ? `step ${alarm.step}` : null;
    const link = (text, values) => h("a", { href: route.link("browse", { run: run.id, ...values }) }, text);
    const title = alarm.title || alarm.text || alarm.rule || "finding";
    return h("details", { class: `card alarm ${TONES[severity]}`, dataset: { key: key(run, alarm) }, open },
      h("summary", {}, h("span", { class: "mark", "aria-hidden": "true" }, MARKS[severity]),
        h("span", { class: "sr" }, severity), h("span", { class: "alarm-title" }, visible.plain(title)),
        h("span", { class: "dim" }, [several ? visible.plain(run.name) : null, steps,
          alarm.times > 1 ? `seen ${alarm.times}×` : null].filter(Boolean).join(" · "))),
      list(alarm.evidence).length ? h("ul", {},
        list(alarm.evidence).map((text) => h("li", {}, visible.plain(text)))) : null,
      list(alarm.proposals).map((proposal, i) => this.proposal(proposal, i)),
      alarm.advice ? h("p", {}, visible.plain(alarm.advice)) : null,
        alarm.expect ? h("p", { class: "dim" }, "Then: ", visible.plain(alarm.expect)) : null,
      list(alarm.witnesses).map((witness) => h("p", { class: "witness" }, witnessLink(run, witness), " ",
        visible.line(witness.summary ?? witness.said, 200))),
      h("p", { class: "links" }, steps && format.isNumber(to) ? link(`trajectories of ${steps}`,
        { step: from === to ? to : `${from}-${to}` }) : null,
        list(alarm.metrics).map((key) => h("a", { href: route.link("overview", { find: key }) }, visible.plain(key)))));
  }

  proposal({ words, why, current }, i) {
    const text = list(words).join(" "), was = list(current).filter(Boolean).join(", ");
    const copy = () => navigator.clipboard.writeText(text).then(() => this.app.notify("Copied."),
      () => this.app.notify("The browser did not allow it."));
    return h("p", { class: "proposal" }, h("b", {}, i ? "or " : "Change "), h("code", {}, visible.plain(text)),
      h("button", { type: "button", class: "quiet", onclick: copy }, "copy"),
      was ? h("span", { class: "dim" }, ` now ${visible.plain(was)}`) : null,
        why ? h("span", {}, ` — ${visible.plain(why)}`) : null);
  }
}

const key = (run, alarm) => `${run.id}/${alarm.rule}`;

/** The last finding of every rule with its number of findings, the most severe first. */
function latest(alarms) {
  const rules = new Map();
  for (const alarm of alarms) rules.set(alarm.rule, { ...alarm, times: (rules.get(alarm.rule)?.times || 0) + 1 });
  const rank = (alarm) => Object.keys(MARKS).indexOf(alarm.severity);
  return [...rules.values()].sort((a, b) => rank(a) - rank(b));
}

/** Link for a witness "trajectories/FILE.jsonl:LINE"; lines count from 1. */
function witnessLink(run, { where }) {
  const found = /([^/]+)\.jsonl:(\d+)$/.exec(where || "");
  if (!found) return visible.plain(where || "");
  return h("a", { href: route.link("trajectory", { run: run.id, at: route.place(found[1], Number(found[2]) - 1) }) },
    visible.plain(`${found[1]}:${found[2]}`));
}
