/* Tokens as separate spans, which can be coloured, pointed at, walked through by keys and linked to. */

import * as dom from "./dom.js";
import * as format from "./format.js";
import { paint, tokensOf } from "./paint.js";
import * as visible from "./visible.js";

const { h } = dom;
// Tokens per block, the unit of layout: a block ends at the first line end after 300 tokens, or after 1200 tokens.
const BLOCK = [300, 1200];

const NEAR = { rootMargin: "1200px" };
const SMALL = 150; // maximum tokens of a block that is always laid out

/** Approximate height of `count` tokens. */
function guess(count) {
  return `${Math.ceil(count / 16) * 22}px`;
}

/** [from, to] of the blocks of a turn. Observation and action are in separate blocks; long ones are split. */
function ranges(tokens) {
  const found = [];
  let from = 0;
  tokens.forEach((token, i) => {
    const size = i + 1 - from, next = tokens[i + 1];
    const full = size >= BLOCK[1] || (size >= BLOCK[0] && (token.text || "").endsWith("\n"));
    if (!full && next && next.part === token.part) return;
    found.push([from, i + 1]);
    from = i + 1;
  });
  return found;
}

/** The tokens of a trajectory; `most`: the largest |advantage| of its group; on: {look(token | null), pick(token)}. */
export class TokenFlow {
  constructor(turns, most, on) {
    this.on = on;
    this.turns = new Map(turns.map((turn) => [turn.number, tokensOf(turn)]));
    this.all = [...this.turns.values()].flat();
    this.most = this.all.reduce((most, t) => Math.max(most, Math.abs(t.advantage || 0)), most);
    this.colouring = "by";
    this.clear();
  }

  /** Discard the boxes created so far. */
  clear() {
    this.close();
    this.blocks = new Map(); // turn → [{element, from, to, spans}]
    const near = (entries) => entries.filter((entry) => entry.isIntersecting).map((entry) => entry.target.block);
    this.seen = new IntersectionObserver((entries) => near(entries).forEach((block) => this.fill(block)), NEAR);
  }

  close() {
    if (this.seen) this.seen.disconnect();
  }

  /** The tokens of a turn in blocks. The spans of a block are created when it is near the visible area. */
  box(number) {
    const tokens = this.turns.get(number);
    const blocks = ranges(tokens).map(([from, to]) => ({ from, to, spans: null, tokens: tokens.slice(from, to) }));
    for (const block of blocks) {
      const count = block.tokens.length, kind = `${block.tokens[0].part}${count > SMALL ? " large" : ""}`;
      block.element = h("div", { class: `block unfilled ${kind}`, vars: { "--guess": guess(count) } });
      block.element.block = block;
      this.seen.observe(block.element);
    }
    this.blocks.set(number, blocks);
    const box = h("div", { class: "tokens", dataset: { turn: number }, role: "group",
      "aria-label": `Tokens of turn ${number}; arrow keys go from one to the next` },
    blocks.map((block) => block.element));
    box.addEventListener("mouseover", (event) => this.on.look(this.of(event.target)));
    box.addEventListener("mouseleave", () => this.on.look(null));
    box.addEventListener("focusin", (event) => this.on.look(this.of(event.target)));
    box.addEventListener("click", (event) => this.of(event.target) && this.on.pick(this.of(event.target)));
    box.addEventListener("keydown", (event) => this.key(event));
    return box;
  }

  fill(block) {
    if (block.spans) return;
    block.spans = block.tokens.map((token) => this.span(token));
    if (block.from === 0) block.spans[0].tabIndex = 0; // one stop of the Tab key for each turn
    block.element.classList.remove("unfilled");
    block.element.append(...block.spans);
    this.seen.unobserve(block.element);
  }

  of(element) {
    const span = element.closest(".tok[data-i]");
    return span ? this.turns.get(Number(span.closest(".tokens").dataset.turn))[Number(span.dataset.i)] : null;
  }

  span(token) {
    const text = token.continued ? "⋯" : token.text === null ? `${token.id} ` : token.text === "" ? "∅" : null;
    const span = h("span", { tabindex: -1, dataset: { i: token.index } },
      text === null ? visible.tokenNodes(token.text) : text);
    this.paint(span, token);
    return span;
  }

  paint(span, token) {
    const [kind, share] = paint(this.colouring, token, this.most);
    const more = [token.special && "special", token.continued && "continued", token.text === null && "id"];
    span.className = ["tok", kind, ...more].filter(Boolean).join(" ");
    span.style.setProperty("--share", share.toFixed(3));
  }

  colour(colouring) {
    if (colouring === this.colouring) return;
    this.colouring = colouring;
    for (const { spans, tokens } of [...this.blocks.values()].flat()) {
      if (spans) spans.forEach((span, i) => this.paint(span, tokens[i]));
    }
    if (this.chosen) this.spanOf(this.chosen)?.classList.add("chosen");
  }

  token(turn, index) {
    return (this.turns.get(turn) || [])[index] || null;
  }

  /** The span of a token, created if necessary; undefined if the tokens are not shown. */
  spanOf(token) {
    const block = (this.blocks.get(token.turn) || []).find((each) => token.index < each.to);
    if (block) this.fill(block);
    return block ? block.spans[token.index - block.from] : undefined;
  }

  /** Mark a token as chosen; null removes the mark. */
  choose(token) {
    if (this.chosen) this.spanOf(this.chosen)?.classList.remove("chosen");
    this.chosen = token;
    if (!token) return;
    const span = this.spanOf(token);
    if (span) span.classList.add("chosen");
  }

  key(event) {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const token = this.of(event.target);
    if (!token || (move === undefined && event.key !== "Enter")) return;
    event.preventDefault();
    event.stopPropagation();
    if (event.key === "Enter") return this.on.pick(token);
    const next = this.all[this.all.indexOf(token) + move];
    if (next) this.spanOf(next).focus();
  }
}

/** All data of a token as a list. */
export function details(token, positions) {
  const p = format.isNumber(token.logprob) ? Math.exp(token.logprob) : null;
  const rows = [
    ["Text", token.text === null ? "(no tokenizer)" : token.continued ? "part of the character before" : h("code",
      { class: "token-text" }, visible.tokenNodes(token.text))],
    ["Id", `${token.id}${token.special ? " (special)" : ""}`],
    ["Position", `${format.number(positions.position)} in the conversation, ${token.index} in turn ${token.turn}`],
    ["Produced by",
      token.by === "policy" ? `policy, version ${format.number(token.version)}` : visible.plain(token.by || "–")],
    ["Trained", token.state[1]],
    ["Log-prob", p === null ? format.missing : `${format.number(token.logprob)} (p ${format.number(p)})`],
    ["Trainer's", format.number(token.trainer)],
    ["Drift", format.number(token.drift)],
    ["Advantage", format.number(token.advantage)],
  ];
  return h("dl", { class: "details" }, rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}
