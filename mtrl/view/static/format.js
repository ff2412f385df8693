/* Readable formats of numbers, times and names. */

import * as visible from "./visible.js";

export const missing = "–";

export function isNumber(x) {
  return typeof x === "number" && Number.isFinite(x);
}

/** At most four significant digits, without trailing zeros. */
export function number(x) {
  if (!isNumber(x)) return missing;
  if (Number.isInteger(x) && Math.abs(x) < 1e6) return group(x);
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return x.toExponential(2).replace(/\.?0*e\+?/, "e").replaceAll("-",
    "−");
  const digits = size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : 3;
  return minus(String(Number(x.toFixed(digits))));
}

function group(x) {
  const text = String(Math.abs(x));
  const grouped = text.length > 4 ? text.replace(/\B(?=(\d{3})+$)/g, "\u202f") : text;
  return (x < 0 ? "−" : "") + grouped;
}

function minus(text) {
  return text.replace("-", "−");
}

export function signed(x) {
  return !isNumber(x) ? missing : (x > 0 ? "+" : "") + number(x);
}

export function percent(x) {
  return isNumber(x) ? `${Number((100 * x).toFixed(1))}\u2009%` : missing;
}

/** Fixed decimals, for columns of figures. */
export function fixed(x, digits = 2) {
  return isNumber(x) ? minus(x.toFixed(digits)) : missing;
}

const UP = "⁰¹²³⁴⁵⁶⁷⁸⁹";

/** A power of ten in exponent notation: 10⁻⁵. */
export function power(x) {
  const n = Math.round(Math.log10(x));
  if (Math.abs(n) < 3) return number(x);
  return `10${n < 0 ? "⁻" : ""}${[...String(Math.abs(n))].map((digit) => UP[digit]).join("")}`;
}

export function seconds(x) {
  if (!isNumber(x)) return missing;
  if (x === 0) return "0\u2009s";
  if (x < 1) return `${number(1000 * x < 10 ? Math.round(10000 * x) / 10 : Math.round(1000 * x))}\u2009ms`;
  if (x < 120) return `${Number(x.toFixed(1))}\u2009s`;
  if (x < 7200) return `${Math.floor(x / 60)}\u2009min ${Math.round(x % 60)}\u2009s`;
  return `${Math.floor(x / 3600)}\u2009h ${Math.round((x % 3600) / 60)}\u2009min`;
}

/** A value of any type from a configuration. Whole numbers have all their digits, since seeds differ in the last. */
export function value(x) {
  if (x === null || x === undefined) return missing;
  if (Number.isInteger(x)) return minus(String(x));
  if (typeof x === "number") return number(x);
  if (typeof x === "string") return visible.plain(x);
  return visible.plain(JSON.stringify(x));
}

export function plural(count, one, many = one + "s") {
  return `${number(count)} ${count === 1 ? one : many}`;
}

export const words = (text) => visible.plain(String(text).replaceAll("_", " "));
