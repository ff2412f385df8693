/* Long lists that are fetched in parts when their rows become visible. */

import { source } from "./data.js";
import * as route from "./route.js";
import { orderOf } from "./selection.js";

const SIZE = 100;
const RETRY = 3000; // milliseconds after a failed request

/**
 * Items 0 … total - 1 of the answers of `fetch({offset, limit})`; `nameOf(item)` identifies an item. `changed(moved)` is
 * called after each answer. An item that it shows at another index than before has moved by `moved` rows: the item at
 * index `anchor()` if the answer contains it, else the last one that was known before.
 */
export class Pages {
  constructor(fetch, changed, nameOf) {
    this.fetch = fetch;
    this.changed = changed;
    this.nameOf = nameOf;
    this.at = 0;
    this.anchor = () => this.at;
    this.items = new Map();
    this.requested = new Map();
    this.age = 0;
    this.sent = 0;
    this.received = 0;
    this.moved = 0; // sum over all answers
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
    const number = ++this.sent;
    this.requested.set(page, this.age);
    let moved = 0;
    try {
      const answer = await this.fetch({ offset: page * SIZE, limit: SIZE });
      this.error = null;
      if (number < this.received && answer.total !== this.total) this.requested.delete(page); // of an older list
      else moved = this.receive(page, answer, number);
    } catch (error) {
      this.error = error;
      // A list that was never shown may be asked for wrongly, which no repetition mends.
      if (source.live && this.total !== null) setTimeout(() => this.load(page), RETRY);
    }
    this.changed(moved);
  }

  /** Record an answer, and return by how many rows its items have moved. */
  receive(page, answer, number) {
    this.received = Math.max(this.received, number);
    const moved = this.movement(answer);
    if (moved) this.move(moved);
    if (answer.total !== this.total) this.stale(); // the other pages are of another list
    this.requested.set(page, this.age);
    this.total = answer.total;
    this.indexing = answer.indexing;
    answer.items.forEach((item, i) => this.items.set(answer.offset + i, item));
    for (const index of [...this.items.keys()]) if (index >= this.total) this.items.delete(index);
    return moved;
  }

  movement(answer) {
    const known = new Map([...this.items].map(([index, item]) => [this.nameOf(item), index]));
    const anchor = this.items.get(this.anchor());
    let moved = 0;
    for (const [i, item] of answer.items.entries()) {
      const name = this.nameOf(item);
      if (!known.has(name)) continue;
      moved = answer.offset + i - known.get(name);
      if (anchor && this.nameOf(anchor) === name) break;
    }
    return moved;
  }

  /** The item at index i moves to i + rows. */
  move(rows) {
    this.items = new Map([...this.items].map(([index, item]) => [index + rows, item]).filter(([index]) => index >= 0));
    if (this.at > 0) this.at = Math.max(0, this.at + rows);
    this.moved += rows;
  }

  /** Request items again when they are needed; the old ones stay until the answer arrives. */
  stale() {
    this.age += 1;
  }

  find(same) {
    for (const [index, item] of this.items) if (same(item)) return index;
    return -1;
  }

  /** Wait until the page of an item is that of the present list. */
  async fresh(index) {
    const page = Math.floor(index / SIZE);
    if (this.requested.get(page) !== this.age) await this.load(page);
  }

  /** The item that is at an index now, fetched if necessary. */
  async item(index) {
    for (let tries = 0; tries < 3 && !this.items.has(index); tries++) {
      if (index < 0 || (this.total !== null && index >= this.total)) return undefined;
      const before = this.moved;
      await this.load(Math.floor(index / SIZE));
      index += this.moved - before;
    }
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

  /** The item at an index; if the search has not reached it, after the end of the search. */
  async item(index) {
    if (index >= this.list.length) await this.running;
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
    { ...query, ...part }), changed, (s) => route.place(s.file, s.line));
  last.key = key;
  return last;
}

/** Index of a trajectory in a list by binary search, since the order is known; -1 if it is not in the list. */
export async function locate(list, summary, values) {
  const same = (s) => s.file === summary.file && s.line === summary.line;
  let known = list.find(same);
  if (known < 0 && list instanceof Found) {
    await list.running;
    known = list.find(same);
  }
  if (known >= 0 && !(list instanceof Found)) {
    await list.fresh(known);
    known = list.find(same);
  }
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
