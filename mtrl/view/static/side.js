/* Facts about a whole trajectory, shown beside its turns. */

import { h } from "./dom.js";
import * as format from "./format.js";
import * as route from "./route.js";
import { bar, outcome, scoreCell, verdictMark } from "./summary.js";
import * as visible from "./visible.js";

const ENDS = {
  __proto__: null,
  done: "The environment ended the episode.", max_turns: "The turn budget was used up.",
    turn_token_limit: "A turn hit its token limit.",
  context_limit: "The conversation filled the context.", parse_error: "A response could not be read.",
    env_error: "The environment raised an error.",
  timeout: "The episode exceeded its time limit.", aborted: "The episode was aborted.",
};

const VERDICTS = {
  lenient: "Solved by the reward, not by the scorer.", strict: "Solved by the scorer, not by the reward.",
};

/** `most` is the largest |reward|, the full length of a reward bar. */
export function side(whole, run, values, most) {
  const s = whole.summary;
  return [verdict(s, run), rewards(whole, most), group(whole, run, values, most),
    numbers("Metrics", whole.metrics, whole.turns.map((t) => t.metrics)), facts(whole), error(whole)];
}

function card(title, ...content) {
  return h("section", { class: "card" }, h("h3", {}, title), content);
}

function pairs(rows) {
  return h("dl", { class: "details" },
    rows.filter(Boolean).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

function verdict(s, run) {
  const verdict = VERDICTS[s.verdict];
  return h("section", { class: `card verdict-card ${s.verdict || ""}` },
    h("div", { class: "figures" },
      h("div", {}, h("small", {}, "Reward"), h("b", {}, format.number(s.reward)),
        h("small", {}, `solved from ${format.number(run.thresholds.claim)}`)),
      h("div", {}, h("small", {}, "Score"), h("b", {}, scoreCell(s)),
        h("small", {}, `solved from ${format.number(run.thresholds.success)}`)),
      h("div", {}, h("small", {}, "Verdict"), h("b", {}, verdictMark(s)))),
    verdict ? h("p", { class: "verdict-text" }, verdict) : null,
    h("p", {}, outcome(s), " ", h("span", { class: "dim" }, ENDS[s.stop] || "")));
}

function rewards({ turns, summary }, most) {
  const row = (name, value, turn) => h("div", { class: "reward-row" },
    turn ? h("button", { type: "button", class: "link", onclick: () => route.change({ turn, token: null }) },
    name) : h("span", {}, name),
    bar(value, most, `${name}: ${format.number(value)}`), h("span", { class: "num" }, format.signed(value)));
  const named = Object.entries(summary.components);
  return card("Reward", h("h4", {}, "By turn"), turns.length > 60 ? h("p", { class: "dim" },
    "the first 60 turns") : null, turns.slice(0, 60).map((t) => row(`turn ${t.number}`, t.reward, t.number)),
    named.length ? h("h4", {}, "By component") : null, named.map(([name, value]) => row(visible.plain(name), value)));
}

function group({ group: members, summary: s }, run, values, most) {
  if (!members || members.length < 2) return null;
  return card("Its group",
    members.map((m) => h("a",
    { class: `sibling ${m.index === s.index && m.line === s.line ? "here" : ""} ${m.verdict || ""}`,
    "aria-current": m.line === s.line ? "true" : null,
    href: route.link("trajectory", { ...route.listValues(values), run: run.id, at: route.place(m.file, m.line),
      show: values.show, colour: values.colour }) },
  h("span", {}, `#${m.index}`), bar(m.reward, most), h("span", { class: "num" }, format.fixed(m.reward)), scoreCell(m),
  h("span", { class: `num ${m.advantage < 0 ? "minus" : m.advantage > 0 ? "plus" : ""}`, title: "Advantage" },
    format.isNumber(m.advantage) ? format.fixed(m.advantage) : ""))));
}

/** Metrics of the episode, and sums over its turns. */
function numbers(title, own, turns) {
  const sums = Object.create(null);
  for (const metrics of turns) for (const [name,
    value] of Object.entries(metrics)) sums[name] = (sums[name] || 0) + value;
  const rows = [...Object.entries(own), ...Object.entries(sums).filter(([name]) => !Object.hasOwn(own, name))];
  return rows.length ? card(title,
    pairs(rows.map(([name, value]) => [visible.plain(name), format.number(value)]))) : null;
}

function facts({ summary: s, turns }) {
  const [oldest, newest] = s.versions || [];
  const policy = oldest === newest ? `version ${newest}` : `versions ${oldest} to ${newest}`;
  const sum = (of) => turns.reduce((total, turn) => total + (of(turn) || 0), 0);
  return card("Facts", pairs([
    ["Tokens", `${format.number(s.tokens)} sampled, ${format.number(s.context)} in all`],
      ["Longest turn", format.plural(s.longest_turn, "token")],
    ["Policy", s.versions ? policy : format.missing],
    ["Generating", format.seconds(sum((t) => t.seconds_generate))],
    ["In the environment", format.seconds(sum((t) => t.seconds_environment))],
    ["Advantage",
      format.isNumber(s.advantage) ? format.signed(Number(s.advantage.toPrecision(3))) : "not recorded"],
      s.drift === null ? null : ["Largest drift", format.number(s.drift)],
    ["Trainable", s.trainable ? "yes" : "no"], ["File", visible.plain(`${s.file}.jsonl, line ${s.line + 1}`)],
  ]));
}

function error({ error: trace }) {
  return trace ? card("Error", h("pre", { class: "text trace" }, visible.nodes(trace))) : null;
}
