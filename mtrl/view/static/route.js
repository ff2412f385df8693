/* The address names everything that is in sight: view, run, filters, trajectory, turn, token, colours. */

/** Filters of the lists; they stay in the address of a trajectory, so that next and previous mean the list. */
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

/** Go there; `replace` leaves no entry in the history, for what is only adjusted. */
export function go(view, values, replace = false) {
  const to = link(view, values);
  if (to === location.hash) return;
  history[replace ? "replaceState" : "pushState"](null, "", to);
  listener();
}

/** The same view with some values changed; null takes one out. */
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

function only(values, names) {
  return Object.fromEntries(names.filter((name) => values[name]).map((name) => [name, values[name]]));
}

/** What a list was asked for: its filters, or its filters and order. */
export const filters = (values) => only(values, FILTERS);
export const asked = (values) => only(values, [...FILTERS, ...ORDER]);
/** What stays when one goes from a list to a trajectory and back. */
export const kept = (values) => only(values, ["run", "level", "q", ...FILTERS, ...ORDER]);

/** A trajectory's place, "FILE/LINE", and a group's, "FILE/GROUP"; no file has a slash in its name. */
export const place = (file, rest) => `${file}/${rest}`;
export const parts = (text) => splitOnce(text || "", "/");
