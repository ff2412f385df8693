/* Filters, sorting, grouping and search of summaries in the page of an exported file, by the rules of the server. */

const list = (value) => (value === undefined || value === null || value === "" ? [] : [].concat(value));
const words = (value) => list(value).flatMap((one) => String(one).split(","));
const flag = (value,
  fact) => value === undefined || value === "" || (fact !== null && (String(value) === "1") === fact);

/** The summaries that match every filter. */
export function chosen(items, f = {}) {
  const [from, to] = f.step ? String(f.step).split("-").map(Number) : [];
  return items.filter((s) =>
    (!f.file || s.file === f.file) &&
    (!f.kind || words(f.kind).includes(s.kind)) &&
    (!f.step || (s.step !== null && s.step >= from && s.step <= (to === undefined ? from : to))) &&
    (!list(f.task).length || list(f.task).includes(s.task)) &&
    (!f.group || s.group === f.group) &&
    (!f.stop || words(f.stop).includes(s.stop)) &&
    (!f.verdict || s.verdict === f.verdict || (f.verdict === "disagree" && ["lenient",
      "strict"].includes(s.verdict))) &&
    flag(f.success, s.success) && flag(f.failed, s.failed) && flag(f.truncated, s.truncated) &&
    flag(f.trainable, s.trainable) && flag(f.readable, s.problem === null) &&
    within(s.reward, f.reward_min, f.reward_max) && within(s.turns, f.turns_min, f.turns_max) &&
    (!f.contains || String(s.task).toLowerCase().includes(f.contains.toLowerCase())));
}

function within(value, low, high) {
  const given = (x) => x !== undefined && x !== "";
  if (value === null) return !given(low) && !given(high);
  return (!given(low) || value >= Number(low)) && (!given(high) || value <= Number(high));
}

const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0);

/** Nulls are last in either order. */
function byValue(value, sign) {
  return (a, b) => {
    const x = value(a), y = value(b);
    if (x === null || y === null) return (x === null) - (y === null);
    return sign * compare(x, y);
  };
}

const newest = (sign) => (a, b) => byValue((s) => s.step, sign)(a, b) || compare(a.kind, b.kind) || compare(a.file,
  b.file) || (a.line ?? 0) - (b.line ?? 0);

const VALUES = {
  __proto__: null,
  gap: (s) => (s.score === null || s.reward === null ? null : Math.abs(s.reward - s.score)),
};

/** Comparison function of a list's order: < 0 if a comes before b. */
export function orderOf({ sort = "newest", order = "desc" } = {}) {
  const sign = order === "asc" ? 1 : -1;
  if (sort === "newest") return newest(sign);
  const first = byValue(VALUES[sort] || ((s) => s[sort] ?? null), sign);
  return (a, b) => first(a, b) || newest(-1)(a, b);
}

function inOrder(items, f) {
  return [...items].sort(orderOf(f));
}

export function sorted(items, f) {
  return inOrder(items, f);
}

export function page(items, { offset = 0, limit } = {}, usual) {
  const size = Number(limit || usual), start = Number(offset);
  return { total: items.length, offset: start, limit: size, items: items.slice(start, start + size),
    indexing: { done: 1, total: 1 } };
}

function mean(values) {
  const numbers = values.filter((x) => typeof x === "number");
  return numbers.length ? numbers.reduce((a, b) => a + b, 0) / numbers.length : null;
}

function spread(values) {
  const middle = mean(values);
  return middle === null ? null : Math.sqrt(mean(values.map((x) => (x - middle) ** 2)));
}

/** The groups of the summaries, sorted. */
export function grouped(items, f) {
  const groups = new Map();
  for (const s of items) {
    const key = `${s.file}\n${s.group}`;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(s);
  }
  return inOrder([...groups.values()].map(group), f);
}

function group(members) {
  members.sort((a, b) => a.index - b.index || a.line - b.line);
  const [first] = members, rewards = members.map((s) => s.reward).filter((x) => typeof x === "number");
  const count = (fact) => members.filter(fact).length;
  const credited = members.filter((s) => s.informative !== null);
  return {
    file: first.file, kind: first.kind, step: first.step, group: first.group, task: first.task, line: first.line,
    size: members.length, reward_mean: mean(rewards), reward_std: spread(rewards),
    reward_min: rewards.length ? Math.min(...rewards) : null, reward_max: rewards.length ? Math.max(...rewards) : null,
    scored: count((s) => s.score !== null), successes: count((s) => s.success === true), failed: count((s) => s.failed),
    lenient: count((s) => s.verdict === "lenient"), strict: count((s) => s.verdict === "strict"),
    disagreements: count((s) => s.verdict === "lenient" || s.verdict === "strict"),
    tokens_mean: mean(members.map((s) => s.tokens)), turns_mean: mean(members.map((s) => s.turns)),
    informative: credited.length ? credited.some((s) => s.informative) : null, members,
  };
}

function counted(items, of) {
  const counts = new Map();
  for (const s of items) if (of(s) !== null) counts.set(of(s), (counts.get(of(s)) || 0) + 1);
  return [...counts].map(([value, count]) => ({ value, count }));
}

export function facets(items) {
  const frequent = (found) => found.sort((a, b) => b.count - a.count || compare(a.value, b.value));
  const tasks = frequent(counted(items, (s) => s.task));
  const of = (task) => items.filter((s) => s.task === task);
  return {
    total: items.length,
    kinds: counted(items, (s) => s.kind).sort((a, b) => compare(a.value, b.value)),
    steps: counted(items, (s) => s.step).sort((a, b) => a.value - b.value),
    stops: frequent(counted(items, (s) => s.stop)),
    verdicts: frequent(counted(items, (s) => s.verdict)),
    tasks: tasks.slice(0, 500).map((t) => ({ ...t, reward_mean: mean(of(t.value).map((s) => s.reward)),
      successes: of(t.value).filter((s) => s.success).length,
        scored: of(t.value).filter((s) => s.score !== null).length })),
    tasks_total: tasks.length,
    components: [...new Set(items.flatMap((s) => Object.keys(s.components || {})))].sort(),
    indexing: { done: 1, total: 1 },
  };
}

/** Search for plain text in all messages; case is ignored. `trajectory(summary)` returns a whole trajectory. */
export function search(items, { q = "", cursor, limit = 50 }, trajectory) {
  const plain = q.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&"), found = [];
  // Without the flag u, letters of ASCII match no others.
  const needle = new RegExp(plain, /^[\0-\x7f]*$/.test(q) ? "gi" : "giu");
  let at = Number(cursor || 0);
  for (; at < items.length && found.length < Number(limit); at++) {
    const whole = trajectory(items[at]);
    const hits = whole && q ? messages(whole).flatMap((m) => hitsOf(m, needle)) : [];
    if (hits.length) found.push({ summary: items[at], hits: hits.slice(0, 3), hit_count: hits.length });
  }
  return { items: found, searched: at, missed: 0, total: items.length, cursor: at < items.length ? String(at) : null };
}

function messages(whole) {
  const messages = whole.turns.flatMap((t) => [...t.observation.messages,
    t.action.message].map((m) => ({ turn: t.number, ...m })));
  return [...messages, ...whole.final_observation.map((m) => ({ turn: 0, ...m }))];
}

function hitsOf({ turn, role, content, reasoning, tool_calls: calls }, needle) {
  const texts = [reasoning, content, ...calls.map((call) => `${call.name} ${call.arguments}`)].filter(Boolean);
  return texts.flatMap((text) => [...text.matchAll(needle)].map(({ 0: match, index }) => ({ turn, role, match,
    before: text.slice(Math.max(0, index - 60), index),
    after: text.slice(index + match.length, index + match.length + 60) })));
}
