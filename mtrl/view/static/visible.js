/* Literal text: control, bidi and zero-width characters get a visible mark, so that nothing is hidden or reordered. */

import { h } from "./dom.js";

const NAMES = new Map([
  [0x00ad, "SHY"], [0x061c, "ALM"], [0x180e, "MVS"], [0x200b, "ZWSP"], [0x200c, "ZWNJ"], [0x200d, "ZWJ"],
  [0x200e, "LRM"], [0x200f, "RLM"], [0x2028, "LS"], [0x2029, "PS"], [0x202a, "LRE"], [0x202b, "RLE"],
  [0x202c, "PDF"], [0x202d, "LRO"], [0x202e, "RLO"], [0x2060, "WJ"], [0x2066, "LRI"], [0x2067, "RLI"],
  [0x2068, "FSI"], [0x2069, "PDI"], [0xfeff, "BOM"], [0xfffd, "U+FFFD"],
]);
const RANGES = [
  "\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f", // control characters, but for tab and newline
  "\\u00ad\\u061c\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f", // zero width, bidi
  "\\u034f\\u115f\\u1160\\u17b4\\u17b5\\u2800\\u3164\\uffa0", // joiner, fillers, vowels and a pattern without ink
  "\\u180b-\\u180f\\ufe00-\\ufe0d\\u{e0100}-\\u{e01ef}", // variation selectors
  "\\ufeff\\ufff9-\\ufffb\\ufffd\\u{e0000}-\\u{e007f}", // byte order mark, replacement, tags
].join("");
// One selector of text or emoji after a visible character is common.
const HIDDEN = new RegExp(`[${RANGES}]|(?<=^|[\\s\\ufe0e\\ufe0f${RANGES}])[\\ufe0e\\ufe0f]`, "gu");
// In a token, white space is visible too, because it is part of the sampled text.
const TOKEN = new RegExp("[ \\n\\t\\u00a0]|" + HIDDEN.source, "gu");
const SPACE = { " ": "·", "\n": "↵", "\t": "⇥", "\u00a0": "⍽" };

function nameOf(character) {
  const code = character.codePointAt(0);
  if (code < 0x20) return String.fromCodePoint(0x2400 + code); // ␀ to ␟
  if (code === 0x7f) return "␡";
  return NAMES.get(code) || "U+" + code.toString(16).toUpperCase().padStart(4, "0");
}

function mark(character) {
  const code = character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
  return h("span", { class: "hidden-char", title: `U+${code}` }, nameOf(character));
}

/** Nodes for running text: line breaks stay, hidden characters become marks. */
export function nodes(text) {
  return split(String(text), HIDDEN, mark);
}

/** Nodes for one token: white space is visible, and a newline also breaks the line. */
export function tokenNodes(text) {
  return split(String(text), TOKEN, (c) =>
    c in SPACE ? h("span", { class: "space" }, SPACE[c] + (c === "\n" ? "\n" : "")) : mark(c));
}

function split(text, pattern, make) {
  const found = [];
  let last = 0;
  for (const match of text.matchAll(pattern)) {
    if (match.index > last) found.push(text.slice(last, match.index));
    found.push(make(match[0]));
    last = match.index + match[0].length;
  }
  if (last < text.length) found.push(text.slice(last));
  return found;
}

/** Plain text with marks, for places that cannot hold elements: titles, options, labels. */
export function plain(text) {
  return String(text).replace(HIDDEN, nameOf);
}

/** A part of a line; each run of white space becomes one space. */
export function snippet(text) {
  return plain(String(text).replace(/\s+/g, " "));
}

/** The first `length` characters, or one less where a surrogate pair would be cut. */
export function start(text, length) {
  const isPair = text.codePointAt(length - 1) > 0xffff;
  return text.slice(0, isPair ? length - 1 : length);
}

/** One line, cut to `length` characters. */
export function line(text, length = 200) {
  const one = plain(start(String(text), 4 * length).replace(/\s+/g, " ").trim());
  return one.length > length ? start(one, length - 1) + "…" : one;
}
