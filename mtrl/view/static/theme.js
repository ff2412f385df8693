/* Light or dark theme: the setting of the system, until the user chooses. */

import { h } from "./dom.js";

const NAME = "mtrl-view-theme";

function chosen() {
  try {
    return localStorage.getItem(NAME);
  } catch {
    return null; // a file opened from disk may have no storage
  }
}

function set(value) {
  document.documentElement.dataset.theme = value;
  try {
    localStorage.setItem(NAME, value);
  } catch { /* without storage, the choice holds for this page only */ }
}

function isDark() {
  const now = document.documentElement.dataset.theme;
  return now ? now === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

export function start() {
  const value = chosen();
  if (value === "light" || value === "dark") document.documentElement.dataset.theme = value;
}

export function button() {
  return h("button", { type: "button", class: "quiet", id: "theme", title: "Light or dark",
    "aria-label": "Light or dark",
    onclick: () => set(isDark() ? "light" : "dark") }, "◐");
}
