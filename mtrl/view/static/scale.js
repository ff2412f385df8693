/* Maps from values to positions and to colours. */

import { isNumber } from "./format.js";

/** Linear or logarithmic scale: value → pixel. */
export function axis(low, high, from, to, log) {
  const f = log ? Math.log10 : (x) => x;
  const a = f(low), b = f(high);
  const place = (x) => from + ((f(x) - a) / (b - a || 1)) * (to - from);
  place.invert = (pixel) => {
    const x = a + ((pixel - from) / (to - from || 1)) * (b - a);
    return log ? 10 ** x : x;
  };
  return place;
}

/** Round values that divide a range into about `count` parts. */
export function ticks(low, high, count) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const raw = span / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((x) => x >= raw * 0.999);
  const found = [];
  const last = Math.floor(high / step + 1e-9);
  for (let i = Math.ceil(low / step - 1e-9); i <= last; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

export function logTicks(low, high) {
  const a = Math.ceil(Math.log10(low) - 1e-9), b = Math.floor(Math.log10(high) + 1e-9);
  const every = Math.max(1, Math.ceil((b - a) / 4));
  const found = [];
  for (let i = a; i <= b; i += every) found.push(10 ** i);
  return found.length ? found : [low, high];
}

/** Range of the data with a margin; for shares, the whole range. */
export function domain(values, { zero = false, share = false, log = false } = {}) {
  const usable = values.filter((v) => isNumber(v) && (!log || v > 0));
  if (!usable.length) return null;
  let low = usable.reduce((a, b) => Math.min(a, b)), high = usable.reduce((a, b) => Math.max(a, b));
  if (log) return [10 ** Math.floor(Math.log10(low)), 10 ** (Math.floor(Math.log10(high)) + 1)];
  if (share) return [Math.min(0, low), Math.max(1, high)];
  if (zero) low = Math.min(0, low), high = Math.max(0, high);
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [zero && low === 0 ? 0 : low - room, high + room];
}

/** Colours for colour-blind readers (Okabe and Ito, 2008); the style sheet names them, light and dark. */
export function categorical(index) {
  return `var(--c${index % 8})`;
}
