/* List of any length that has only the visible rows in the page. */

import { h } from "./dom.js";

/**
 * row(index) → element, for index in 0 … count - 1. All rows have the same height, so the scroll bar is exact.
 * The list is one stop of the Tab key: arrows, Page Up and Down, Home and End move, Enter opens (`open(index)`).
 */
export class VirtualList {
  static ROW = 30;
  static BEYOND = 12; // extra rows above and below the visible ones

  constructor({ head, row, open, label }) {
    this.row = row;
    this.open = open;
    this.count = 0;
    this.selected = 0;
    this.rows = new Map();
    this.spacer = h("div", { class: "vl-spacer" });
    this.body = h("div", { class: "vl-body", role: "rowgroup" }, this.spacer);
    this.element = h("div", { class: "vl", role: "grid", tabindex: 0, "aria-label": label }, head, this.body);
    this.element.addEventListener("scroll", () => this.render(), { passive: true });
    this.resize = new ResizeObserver(() => this.render());
    this.resize.observe(this.element);
  }

  close() {
    this.resize.disconnect();
  }

  /** Draw all rows again. `stays` does not scroll to the selected row, for rows that arrived later. */
  show(count, selected, stays = false) {
    this.count = count;
    this.selected = Math.max(0, Math.min(selected, count - 1));
    this.spacer.style.height = `${count * VirtualList.ROW}px`;
    this.element.setAttribute("aria-rowcount", count);
    this.rows.forEach((element) => element.remove());
    this.rows.clear();
    if (!stays) this.reveal(this.selected);
    this.render();
  }

  /** Whether the user left the top of the list. */
  moved() {
    return this.element.scrollTop >= VirtualList.ROW || this.selected > 0;
  }

  /** Account for rows that have moved by `rows`; the visible rows stay visible. */
  shift(rows) {
    this.count += rows;
    this.selected += rows;
    this.spacer.style.height = `${this.count * VirtualList.ROW}px`;
    this.element.scrollTop += rows * VirtualList.ROW;
  }

  render() {
    const height = this.element.clientHeight;
    if (!height) return;
    const first = Math.max(0, Math.floor(this.element.scrollTop / VirtualList.ROW) - VirtualList.BEYOND);
    const last = Math.min(this.count, first + Math.ceil(height / VirtualList.ROW) + 2 * VirtualList.BEYOND);
    for (const [index, element] of this.rows) {
      if (index < first || index >= last) element.remove(), this.rows.delete(index);
    }
    for (let index = first; index < last; index++) if (!this.rows.has(index)) this.add(index);
  }

  add(index) {
    const element = this.row(index);
    element.classList.add("vl-row");
    element.setAttribute("role", "row");
    element.setAttribute("aria-rowindex", index + 1);
    element.id = `row-${index}`;
    element.style.transform = `translateY(${index * VirtualList.ROW}px)`;
    this.mark(element, index);
    element.addEventListener("click", (event) => {
      if (event.metaKey || event.ctrlKey || event.target.closest("a")) return;
      this.select(index);
      this.open(index);
    });
    this.rows.set(index, element);
    this.body.append(element);
  }

  reveal(index) {
    const head = this.body.offsetTop;
    const box = this.element, top = index * VirtualList.ROW;
    const lowest = top + VirtualList.ROW + head - box.clientHeight;
    if (top < box.scrollTop) box.scrollTop = top;
    else if (lowest > box.scrollTop) box.scrollTop = lowest;
  }

  select(index) {
    this.selected = Math.max(0, Math.min(index, this.count - 1));
    this.reveal(this.selected);
    this.render();
    this.rows.forEach((element, i) => this.mark(element, i));
  }

  mark(element, index) {
    const chosen = index === this.selected;
    element.classList.toggle("selected", chosen);
    element.setAttribute("aria-selected", chosen);
    if (chosen) this.element.setAttribute("aria-activedescendant", `row-${index}`);
  }

  /** Keys of the list, for the view that shows it. */
  keys() {
    const page = Math.max(1, Math.floor(this.element.clientHeight / VirtualList.ROW) - 2);
    const moves = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1, PageDown: page, PageUp: -page, Home: -this.count,
      End: this.count };
    const go = (move) => {
      this.select(this.selected + move);
      this.element.focus({ preventScroll: true }); // so that Enter opens the row, not the element clicked last
    };
    const acts = Object.entries(moves).map(([key, move]) => [key, () => go(move)]);
    return { ...Object.fromEntries(acts), Enter: () => this.open(this.selected) };
  }
}
