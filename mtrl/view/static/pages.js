/* Long lists that are fetched in parts when their rows become visible. */

import { source } from "./data.js";
import * as route from "./route.js";
import { orderOf } from "./selection.js";

const SIZE = 100;

/**
 * Items 0 … total - 1 of the answers of `fetch({offset, limit})`. With `newest`, new items are inserted at the top.
 * `changed(inserted)` is called after each answer, with the number of items that it inserted at the top.
 */
export class Pages {
  constructor(fetch, changed, newest) {
    this.fetch = fetch;
    this.changed = changed;
    this.newest = newest;
    this.at = 0;
    this.items = new Map();
    this.requested = new Map();
    this.age = 0;
    this.total = null;
    this.error = null;
    this.indexing = null;
  }

  /** The item, or undefined until its answer arrives. */
  get(index) {
    const page = Math.floor(index / SIZE);
    if (this.requested.get(page) !== this.age) this.load(page);
    return this.items.get(index);
  }

  async load(page) {
    const age = this.age;
    this.requested.set(page, age);
    let inserted = 0;
    try {
      const answer = await this.fetch({ offset: page * SIZE, limit: SIZE });
      if (age !== this.age) return;
      this.error = null;
      inserted = this.receive(page, answer);
    } catch (error) {
      if (age !== this.age) return;
      this.requested.delete(page);
      this.error = error;
    }
    this.changed(inserted);
  }

  /** Record an answer, and return how many items it shows to be inserted at the top. */
  receive(page, answer) {
    const more = this.total === null ? 0 : answer.total - this.total;
    const inserted = this.newest && more > 0 ? more : 0;
    if (more) this.stale(); // the other pages are of the old list
    if (inserted) this.shift(inserted);
    this.requested.set(page, this.age);
    this.total = answer.total;
    this.indexing = answer.indexing;
    answer.items.forEach((item, i) => this.items.set(answer.offset + i, item));
    return inserted;
  }

  /** Request visible items again; the old ones stay until the answer arrives. */
  stale() {
    this.age += 1;
  }

  /** The item at index i moves to i + count. */
  shift(count) {
    this.items = new Map([...this.items].map(([index, item]) => [index + count, item]));
    if (this.at > 0) this.at += count;
  }

  find(same) {
    for (const [index, item] of this.items) if (same(item)) return index;
    return -1;
  }

  /** The item at an index, fetched if necessary. */
  async item(index) {
    if (index < 0 || (this.total !== null && index >= this.total)) return undefined;
    if (!this.items.has(index)) await this.load(Math.floor(index / SIZE));
    return this.items.get(index);
  }
}

/** Results of a search. They grow while they are shown, because each request searches only a part. */
export class Found {
  constructor(run, values, changed) {
    this.run = run;
    this.values = values;
    this.changed = changed;
    this.list = [];
    this.at = 0;
    this.total = 0;
    this.searched = 0;
    this.missed = 0;
    this.of = null;
    this.error = null;
    this.done = false;
    this.running = this.more();
  }

  get(index) {
    return this.list[index];
  }

  async item(index) {
    return this.list[index];
  }

  find(same) {
    return this.list.findIndex(same);
  }

  stop() {
    this.done = true;
  }

  async more() {
    let cursor;
    while (!this.done) {
      try {
        const answer = await source.search(this.run, { ...this.values, cursor, limit: SIZE });
        if (this.done) return;
        this.list.push(...answer.items.map((found) => ({ ...found.summary, hits: found.hits,
          hit_count: found.hit_count })));
        this.total = this.list.length;
        this.searched = answer.searched;
        this.missed = answer.missed;
        this.of = answer.total;
        cursor = answer.cursor;
        this.done = cursor === null || this.total >= 5000;
      } catch (error) {
        this.error = error;
        this.done = true;
      }
      this.changed();
    }
  }
}

let last = null;

/** The list for filters, order and search. A request for the same list returns it with its items and position `at`. */
export function listed(run, values, changed) {
  const { q } = values, query = route.listQuery(values);
  const key = JSON.stringify([run, query, q || ""]);
  if (last && last.key === key) {
    last.changed = changed;
    if (!q) last.stale();
    return last;
  }
  if (last instanceof Found) last.stop();
  last = q ? new Found(run, { ...query, q }, changed) : new Pages((part) => source.trajectories(run,
    { ...query, ...part }), changed, !query.sort && !query.order);
  last.key = key;
  return last;
}

/** Index of a trajectory in a list by binary search, since the order is known; -1 if it is not in the list. */
export async function locate(list, summary, values) {
  const same = (s) => s.file === summary.file && s.line === summary.line;
  if (list instanceof Found) await list.running;
  const known = list.find(same);
  if (known >= 0 || list instanceof Found) return known;
  const before = orderOf(route.listQuery(values));
  if (list.total === null) await list.item(0);
  let low = 0, high = list.total;
  while (low < high) {
    const middle = Math.floor((low + high) / 2);
    const { items: [there] } = await list.fetch({ offset: middle, limit: 1 });
    if (!there) return -1;
    if (same(there)) return middle;
    if (before(there, summary) < 0) low = middle + 1;
    else high = middle;
  }
  return -1;
}
