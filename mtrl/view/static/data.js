/* Data sources of the page: the server, or the JSON inside an exported file. Both have the same methods and
  answers. */

import * as selection from "./selection.js";

/** Path of the API with percent-encoded parts. */
function path(...parts) {
  return "/api/" + parts.map((part) => encodeURIComponent(part)).join("/");
}

function query(values) {
  const words = new URLSearchParams();
  for (const [key, value] of Object.entries(values || {})) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== undefined && one !== null && one !== "") words.append(key, one);
    }
  }
  const text = words.toString();
  return text ? "?" + text : "";
}

/** Requests that both sources answer. Subclasses define `get(path, values)`, whose errors are one plain sentence. */
class Source {
  runs() { return this.get(path("runs")); }
  sweeps() { return this.get(path("sweeps")); }
  config(run) { return this.get(path("runs", run, "config")); }
  metrics(run, keys) { return this.get(path("runs", run, "metrics"), { keys }); }
  timeline(run) { return this.get(path("runs", run, "timeline")); }
  rows(run) { return this.get(path("runs", run, "rows")); }
  alarms(run) { return this.get(path("runs", run, "alarms")); }
  files(run) { return this.get(path("runs", run, "files")); }
  trajectories(run, values) { return this.get(path("runs", run, "trajectories"), values); }
  groups(run, values) { return this.get(path("runs", run, "groups"), values); }
  facets(run, values) { return this.get(path("runs", run, "facets"), values); }
  search(run, values) { return this.get(path("runs", run, "search"), values); }
  trajectory(run, file, line) { return this.get(path("runs", run, "trajectory", file, line)); }
}

class Server extends Source {
  live = true;
  leftOut = 0;
  recent = new Map(); // cache of the last trajectories, for going back and forth

  async get(address, values) {
    let answer;
    try {
      answer = await fetch(address + query(values), { headers: { Accept: "application/json" } });
    } catch {
      throw new Error("The server does not answer. Is mtrl view still running?");
    }
    const body = await answer.json().catch(() => null);
    if (!answer.ok) throw new Error((body && body.error) || `The server answered ${answer.status}.`);
    if (body === null) throw new Error("The server's answer is not JSON.");
    return body;
  }

  changes(state) {
    return this.get(path("changes"), { since: state });
  }

  trajectory(run, file, line) {
    const key = [run, file, line].join("\n");
    if (!this.recent.has(key)) {
      const found = super.trajectory(run, file, line);
      found.catch(() => this.recent.delete(key));
      this.recent.set(key, found);
      if (this.recent.size > 24) this.recent.delete(this.recent.keys().next().value);
    }
    return this.recent.get(key);
  }

  /** Drop the cached trajectories of a run, because a resumed run may rewrite its files. */
  forget(run) {
    for (const key of this.recent.keys()) if (key.startsWith(run + "\n")) this.recent.delete(key);
  }
}

class Exported extends Source {
  live = false;

  constructor(exported) {
    super();
    this.exported = exported;
    this.leftOut = exported.left_out;
  }

  async get(address, values) {
    const answer = this.exported.routes[address];
    if (answer === undefined) throw new Error("The exported file does not contain this; open the run itself.");
    const keys = (address.endsWith("/metrics") && values && values.keys) || [];
    if (keys.length) return this.columns(answer, keys);
    return answer;
  }

  columns(answer, patterns) {
    const fits = (key) => patterns.some((w) => (w.endsWith("*") ? key.startsWith(w.slice(0, -1)) : key === w));
    return { ...answer, columns: Object.fromEntries(Object.entries(answer.columns).filter(([key]) => fits(key))) };
  }

  summaries(run) {
    const answer = this.exported.routes[path("runs", run, "trajectories")];
    return answer ? answer.items : [];
  }

  whole(run, s) {
    return this.exported.routes[path("runs", run, "trajectory", s.file, s.line)];
  }

  async trajectories(run, values) {
    return selection.page(selection.sorted(selection.chosen(this.summaries(run), values), values), values, 100);
  }

  /** Groups with all their members: the summary of a member is in the file even if its trajectory was left out. */
  async groups(run, values) {
    const members = new Map();
    for (const s of this.summaries(run)) {
      for (const each of [s, ...this.whole(run, s).group]) members.set(`${each.file}\n${each.line}`, each);
    }
    return selection.page(selection.grouped(selection.chosen([...members.values()], values), values), values, 50);
  }

  async facets(run, values) {
    return selection.facets(selection.chosen(this.summaries(run), values));
  }

  async search(run, values) {
    const items = selection.sorted(selection.chosen(this.summaries(run), values), values);
    return selection.search(items, values, (s) => this.whole(run, s));
  }
}

const exported = document.getElementById("mtrl-export");

export const source = exported ? new Exported(JSON.parse(exported.textContent)) : new Server();
