/* Cache of the requested metrics of the runs; they are requested again when a run has written more. */

import { source } from "./data.js";

export class MetricStore {
  constructor() {
    this.runs = new Map(); // run id → {keys, columns, requests: key → promise of its answer}
  }

  column(run, key) {
    const known = this.runs.get(run);
    return known && Object.hasOwn(known.columns, key) ? known.columns[key] : undefined;
  }

  /** All keys that any of the runs has. */
  keys(runs) {
    return [...new Set(runs.flatMap((run) => (this.runs.get(run.id) || { keys: [] }).keys))].sort();
  }

  last(run, key) {
    const column = this.column(run, key);
    return column && column.values.length ? column.values.at(-1) : null;
  }

  first(run, key) {
    const column = this.column(run, key);
    return column && column.values.length ? column.values[0] : null;
  }

  count(run, key) {
    return (this.column(run, key) || { values: [] }).values.length;
  }

  /** Fetch the missing ones of `keys`, and wait for pending requests. */
  async need(run, keys) {
    const known = this.known(run);
    const missing = keys.filter((key) => !known.requests.has(key));
    if (missing.length) this.fetch(run, missing);
    await Promise.all(keys.map((key) => known.requests.get(key)));
  }

  /** Fetch `keys` and all previously requested keys again. */
  async again(run, keys) {
    await this.fetch(run, [...new Set([...keys, ...this.known(run).requests.keys()])]);
  }

  known(run) {
    if (!this.runs.has(run)) this.runs.set(run, { keys: [], columns: {}, requests: new Map() });
    return this.runs.get(run);
  }

  fetch(run, keys) {
    const known = this.known(run);
    const answer = source.metrics(run, keys).then((found) => {
      known.keys = found.keys;
      Object.assign(known.columns, found.columns);
    }, (error) => {
      keys.forEach((key) => known.requests.get(key) === answer && known.requests.delete(key));
      throw error;
    });
    keys.forEach((key) => known.requests.set(key, answer));
    return answer;
  }
}
