/* Summary of one trajectory in a line: verdict, score and stop reason. */

import { source } from "./data.js";
import { h } from "./dom.js";
import * as format from "./format.js";
import * as visible from "./visible.js";

const VERDICTS = {
  lenient: ["lenient", "Solved by the reward, not by the scorer"],
  strict: ["strict", "Solved by the scorer, not by the reward"],
  agree: ["agree", "Reward and scorer agree"],
};

export function verdictMark(s) {
  if (!s.verdict) return h("span", { class: "verdict none", title: "Not scored" }, format.missing);
  const [name, about] = VERDICTS[s.verdict] || [s.verdict, ""];
  return h("span", { class: `verdict ${s.verdict}`, title: about }, visible.plain(name));
}

/** The score with a mark, so that it does not depend on its colour alone. */
export function scoreCell(s) {
  if (s.score === null) return h("span", { class: "score none", title: "Not scored" }, format.missing);
  return h("span", { class: `score ${s.success ? "yes" : "no"}`,
    title: s.success ? "Success by the scorer" : "No success by the scorer" },
    h("span", { "aria-hidden": "true" }, s.success ? "✓" : "✗"), ` ${format.number(s.score)}`);
}

export function outcome(s) {
  if (s.problem) return h("span", { class: "stop bad", title: visible.plain(s.problem) }, "unreadable");
  const kind = s.failed ? "bad" : s.truncated ? "cut" : s.stop === "done" ? "" : "limit";
  const cut = s.cut_turns ? `${format.plural(s.cut_turns, "turn")} cut at the token limit` : null;
  const why = s.error ? visible.plain(s.error) : cut;
  return h("span", { class: `stop ${kind}`, title: why }, format.words(s.stop), s.cut_turns ? " ✂" : null);
}

/** Bar of a reward from zero. `most` is the reward of a full bar. */
export function bar(value, most, about) {
  const size = most > 0 && format.isNumber(value) ? Math.min(1, Math.abs(value) / most) : 0;
  return h("span", { class: `bar ${value < 0 ? "minus" : "plus"}`, title: about, role: "img",
    "aria-label": about || format.number(value) },
    h("i", { vars: { "--size": size } }));
}

/** Text such as "1,204 trajectories", with the progress of indexing a large run. */
export function counted(total, indexing, one = "trajectory", many = "trajectories") {
  if (total === null) return "Reading…";
  const reading = indexing && indexing.done < indexing.total;
  const share = reading ? `, ${Math.floor((100 * indexing.done) / indexing.total)}\u2009% of the files read` : "";
  const missing = format.plural(source.leftOut, "trajectory", "trajectories");
  return format.plural(total, one, many) + share + (source.leftOut ? `; ${missing} left out of this file` : "");
}
