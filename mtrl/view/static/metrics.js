/* The metrics of the runs, as far as they were asked for; asked for again when a run has written more. */

import { source } from "./data.js";

export class MetricStore {
  constructor() {
    this.runs = new Map(); // run id → {keys, columns, asked}
  }

  column(run, key) {
    const known = this.runs.get(run);
    return known && Object.hasOwn(known.columns, key) ? known.columns[key] : undefined;
  }

  /** Every key that any of the runs has. */
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

  /** Fetch what is missing of `keys`. */
  async need(run, keys) {
    const known = this.runs.get(run);
    const missing = known ? keys.filter((key) => !known.asked.has(key)) : keys;
    if (missing.length) await this.fetch(run, missing);
  }

  /** Fetch anew all that was ever asked for. */
  async again(run) {
    const known = this.runs.get(run);
    if (known) await this.fetch(run, [...known.asked]);
  }

  async fetch(run, keys) {
    const known = this.runs.get(run) || { keys: [], columns: {}, asked: new Set() };
    this.runs.set(run, known);
    keys.forEach((key) => known.asked.add(key));
    try {
      const answer = await source.metrics(run, keys);
      known.keys = answer.keys;
      Object.assign(known.columns, answer.columns);
    } catch (error) {
      keys.forEach((key) => known.asked.delete(key));
      throw error;
    }
  }
}
