/* The five colourings of tokens, and their legends. */

import { h } from "./dom.js";
import * as format from "./format.js";
import * as visible from "./visible.js";

/** Colourings in the order of the keys 1 to 5. */
export const COLOURINGS = [
  ["advantage", "Advantage", "Advantage in the update: blue is positive, orange is negative"],
  ["logprob", "Log-prob", "Log-probability when the token was sampled: darker is less likely"],
  ["drift", "Drift", "|trainer's − engine's log-prob|, on a logarithmic scale"],
  ["by", "Produced by", "Origin: template, prompt, environment or policy, with its version"],
  ["trained", "Trained", "Whether the token is trained, and the reason if not"],
];
const LOWEST = -6; // log-prob at which the colour is full: p = 0.0025
const DRIFT = [-7, 0]; // powers of ten, from no colour to full colour
// This table and similar ones have no prototype, so that a name from a run or an address cannot find "constructor".
const WHO = { __proto__: null, template: "chat template", system: "system prompt", user: "prompt, environment",
  tool: "tool results",
  assistant: "assistant (not sampled)", policy: "policy" };

/** The tokens of a turn with all their data: {turn, index, part, id, text, special, by, version, logprob, …}. */
export function tokensOf(turn) {
  return [...part(turn, "observation", turn.observation.tokens, 0),
    ...part(turn, "action", turn.action.tokens, turn.observation.tokens.ids.length)];
}

/** [[count, value]…] → a list with each value repeated `count` times. */
function repeat(runs) {
  return runs.flatMap(([count, value]) => Array(count).fill(value));
}

function part(turn, name, t, start) {
  const by = repeat(t.by), special = new Set(t.special), continued = new Set(t.continued);
  const versions = name === "action" ? repeat(turn.versions.map(([version, count]) => [count, version])) : [];
  const at = (column, i) => (column ? column[i] ?? null : null);
  return t.ids.map((id, i) => ({
    turn: turn.number, index: start + i, part: name, id, text: at(t.texts, i), special: special.has(i),
      continued: continued.has(i),
    by: by[i] || null, version: versions[i] ?? null, logprob: at(t.logprobs, i), trainer: at(t.trainer_logprobs, i),
      drift: at(t.drift, i),
    advantage: at(t.advantages, i), state: state(turn, name, at(t.advantages, i)),
  }));
}

/** [class, reason] for whether a token is trained. */
function state(turn, name, advantage) {
  if (name === "observation") return ["masked", "masked: not sampled by the policy"];
  if (!turn.trained) return ["untrained", turn.untrained || "not trained"];
  return advantage === 0 ? ["flat", "trained on, with advantage 0: no gradient"] : ["trained", "trained"];
}

/** Returns [class, strength 0…1] of a token. `most` is the largest |advantage| of the group. */
export function paint(colouring, token, most) {
  if (colouring === "by") {
    const odd = token.version !== null && token.version % 2 ? " odd" : "";
    return [`by-${token.by in WHO ? token.by : "other"}${odd}`, 1];
  }
  if (colouring === "trained") return [token.state[0], 1];
  if (colouring === "advantage") {
    if (!format.isNumber(token.advantage)) return ["unknown", 0];
    return [token.advantage < 0 ? "down" : "up", most > 0 ? Math.abs(token.advantage) / most : 0];
  }
  const value = colouring === "logprob" ? token.logprob : token.drift;
  if (!format.isNumber(value)) return ["unknown", 0];
  if (colouring === "logprob") return ["rare", Math.min(1, Math.max(0, value / LOWEST))];
  const power = Math.log10(Math.abs(value) || 1e-99);
  return ["drift", Math.min(1, Math.max(0, (power - DRIFT[0]) / (DRIFT[1] - DRIFT[0])))];
}

/** Legend of the colours, with a scale or with counts. */
export function legend(colouring, tokens, most) {
  if (colouring === "advantage") return known(tokens, "advantage",
    "No advantage was recorded: the token was not trained.", () => ramp(["down", "up"],
    [-most, 0, most].map(format.signed)));
  if (colouring === "logprob") return known(tokens, "logprob", "No log-probs were stored.",
    () => ramp(["rare"], [0, LOWEST / 3, (2 * LOWEST) / 3,
    LOWEST].map((x) => `${format.number(x)} (p ${format.number(Number(Math.exp(x).toPrecision(2)))})`)));
  if (colouring === "drift") return known(tokens, "drift", "The trainer's log-probs were not stored.",
    () => ramp(["drift"], ["≤ 10⁻⁷", "10⁻⁵", "10⁻³", "≥ 1"]));
  const names = new Map();
  for (const token of tokens) {
    const [kind] = paint(colouring, token, most);
    const version = token.version !== null ? ` v${token.version}` : "";
    const text = colouring === "trained" ? token.state[1] : (WHO[token.by] || visible.plain(token.by)) + version;
    const entry = names.get(text) || { kind, count: 0 };
    entry.count += 1;
    names.set(text, entry);
  }
  return h("div", { class: "legend" }, [...names].map(([text, { kind, count }]) => h("span", { class: "key" },
    h("i", { class: `tok ${kind}`, vars: { "--share": 1 } }), visible.plain(text),
      h("small", { class: "num" }, format.number(count)))));
}

function known(tokens, what, otherwise, make) {
  return tokens.some((token) => format.isNumber(token[what])) ? make() : h("div", { class: "legend" },
    h("span", { class: "dim" }, otherwise));
}

function ramp(kinds, labels) {
  const steps = [0, 0.2, 0.4, 0.6, 0.8, 1];
  const cells = kinds.length === 2 ? [...[...steps].reverse().slice(0, -1).map((x) => [kinds[0], x]),
    ...steps.map((x) => [kinds[1], x])] : steps.map((x) => [kinds[0], x]);
  return h("div", { class: "legend" }, h("span", { class: "ramp" },
    h("span", { class: "ramp-bar", "aria-hidden": "true" }, cells.map(([kind, x]) => h("i",
    { class: `tok ${kind}`, vars: { "--share": x } }))),
    h("span", { class: "ramp-labels" }, labels.map((text) => h("span", {}, text)))),
      h("span", { class: "key" }, h("i", { class: "tok unknown" }), "no value (masked)"));
}
