/* Lines of a chart, computed from the metrics of runs: of one run,
  or the mean and spread of runs that differ only in the seed. */

import { isNumber } from "./format.js";

/** Entities to draw: {label, runs, colour}; `group` joins the runs of one family. */
export function entities(runs, group, colour) {
  const families = new Map();
  runs.forEach((run) => {
    const key = group ? run.family || run.id : run.id;
    if (!families.has(key)) families.set(key, []);
    families.get(key).push(run);
  });
  const taken = new Map();
  return [...families].map(([key, members], i) => {
    const name = nameOf(members, runs), n = (taken.get(name) || 0) + 1;
    taken.set(name, n); // a label has at most two settings, but runs may differ in a third
    return { key, runs: members, label: n > 1 ? `${name} (${n})` : name, colour: colour(i) };
  });
}

function nameOf(members, runs) {
  const [run] = members;
  const alike = runs.filter((other) => other.name === run.name);
  const settings = Object.entries(run.differences || {}).filter(([key]) => key !== "seed" && key !== "name");
  const differences = settings.map(([key, value]) => `${key.split(".").at(-1)}=${value}`);
  const what = alike.length > members.length ? differences : [];
  const seed = members.length === 1 && alike.length > 1 && run.seed !== null ? [`seed ${run.seed}`] : [];
  const repeats = new Set(members.map((member) => member.seed)).size < members.length;
  const several = members.length > 1 ? [`${members.length} ${repeats ? "runs" : "seeds"}`] : [];
  const parts = [...what.slice(0, 2), ...seed, ...several];
  return parts.length ? `${run.name} (${parts.join(", ")})` : run.name;
}

function column(store, run, key) {
  const found = key && store.column(run.id, key);
  return new Map(found ? found.steps.map((step, i) => [step, found.values[i]]) : []);
}

/** Points of one line of one entity: {x, y, low, high, n}. With several runs: mean, and mean ∓ standard deviation. */
export function points(store, entity, line, factor = 1) {
  const columns = entity.runs.map((run) => column(store, run, line.key));
  if (columns.length > 1) return together(columns, factor);
  const low = column(store, entity.runs[0], line.low), high = column(store, entity.runs[0], line.high);
  const times = (x) => (isNumber(x) ? x * factor : null);
  return [...columns[0]].map(([x, y]) => ({ x, y: times(y), low: times(low.get(x)), high: times(high.get(x)), n: 1 }));
}

function together(columns, factor) {
  const steps = [...new Set(columns.flatMap((c) => [...c.keys()]))].sort((a, b) => a - b);
  return steps.map((x) => {
    const values = columns.map((c) => c.get(x)).filter(isNumber).map((y) => y * factor);
    if (!values.length) return { x, y: null, n: 0 };
    const mean = values.reduce((a, b) => a + b, 0) / values.length;
    const spread = values.length > 1 ? Math.sqrt(values.reduce((sum, y) => sum + (y - mean) ** 2,
      0) / (values.length - 1)) : null;
    return { x, y: mean, low: spread === null ? null : mean - spread, high: spread === null ? null : mean + spread,
      n: values.length };
  });
}

/** Running mean over `window` measured points: each point and those before it. */
export function smooth(list, window) {
  if (window < 2) return list;
  const known = list.filter((p) => isNumber(p.y));
  return known.map((p, i) => {
    const part = known.slice(Math.max(0, i - window + 1), i + 1);
    const mean = (of) => part.reduce((sum, q) => sum + of(q), 0) / part.length;
    const band = part.every((q) => isNumber(q.low) && isNumber(q.high));
    return { ...p, y: mean((q) => q.y), low: band ? mean((q) => q.low) : null,
      high: band ? mean((q) => q.high) : null };
  });
}
