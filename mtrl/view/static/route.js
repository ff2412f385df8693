/* The address determines everything that is shown: view, run, filters, trajectory, turn, token, colours. */

/** Filters of the lists. They stay in the address of a trajectory, so that next and previous walk through the list. */
export const FILTERS = ["file", "kind", "step", "task", "group", "stop", "verdict", "success", "failed", "truncated",
  "trainable", "readable", "reward_min", "reward_max", "turns_min", "turns_max", "contains"];
const ORDER = ["sort", "order"];

let listener = () => {};

/** {view, values}: "#browse?run=a&kind=train" → {view: "browse", values: {run: "a", kind: "train"}}. */
export function read(hash = location.hash) {
  const [view, rest] = splitOnce(hash.replace(/^#\/?/, ""), "?");
  return { view: view || "overview", values: Object.fromEntries(new URLSearchParams(rest)) };
}

function splitOnce(text, mark) {
  const at = text.indexOf(mark);
  return at < 0 ? [text, ""] : [text.slice(0, at), text.slice(at + 1)];
}

export function link(view, values = {}) {
  const words = new URLSearchParams();
  for (const [key, value] of Object.entries(values)) {
    if (value !== undefined && value !== null && value !== "") words.set(key, value);
  }
  const text = words.toString().replaceAll("%2F", "/").replaceAll("%2C", ",");
  return `#${view}${text ? "?" + text : ""}`;
}

/** Go to an address; `replace` adds no entry to the history, for small adjustments. */
export function go(view, values, replace = false) {
  const to = link(view, values);
  if (to === location.hash) return;
  history[replace ? "replaceState" : "pushState"](null, "", to);
  listener();
}

/** Go to the same view with some values changed; null removes a value. */
export function change(values, replace = false) {
  const now = read();
  go(now.view, { ...now.values, ...values }, replace);
}

/** Call `follow` now and whenever the address changes. */
export function start(follow) {
  listener = follow;
  window.addEventListener("popstate", follow);
  follow();
}

function only(values, keys) {
  return Object.fromEntries(keys.filter((key) => values[key]).map((key) => [key, values[key]]));
}

/** Parameters of a list: its filters, or its filters and its order. */
export const filters = (values) => only(values, FILTERS);
export const listQuery = (values) => only(values, [...FILTERS, ...ORDER]);
/** Values that stay when the user goes from a list to a trajectory and back. */
export const listValues = (values) => only(values, ["run", "level", "q", ...FILTERS, ...ORDER]);

/** Several names as one value of the address, joined by commas; a name may contain commas, too. */
export const joined = (several) => several.map((name) => name.replaceAll("%", "%25").replaceAll(",", "%2C")).join(",");
export const names = (value) => (value || "").split(",").filter(Boolean).map((name) =>
  name.replaceAll("%2C", ",").replaceAll("%25", "%"));

/** Location of a trajectory, "FILE/LINE", or of a group, "FILE/GROUP"; file names have no slash. */
export const place = (file, rest) => `${file}/${rest}`;
export const parts = (text) => splitOnce(text || "", "/");
