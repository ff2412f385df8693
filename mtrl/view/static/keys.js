/* Keyboard: keys that work everywhere, and the keys of the current view. */

import * as dom from "./dom.js";
import * as route from "./route.js";

const { h } = dom;
const HELP = [
  ["j  k", "next, previous trajectory (in a list: row)"], ["n  p", "next, previous turn"],
    ["←  →", "token to token; step to step in a chart"],
  ["1 … 5", "colour tokens by advantage, log-prob, drift, producer, trained"], ["t", "conversation or tokens"],
    ["/", "search"],
  ["Enter", "open"], ["g  b", "back to the list"], ["o", "overview"], ["c", "copy the link"],
    ["Esc", "close, leave a field"], ["?", "this help"],
];

const TYPING = "input:not([type=checkbox]):not([type=radio]), select, textarea";
const typing = (element) => element.matches(TYPING);

export function start(app) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (typing(event.target)) {
      if (event.key === "Escape") {
        event.preventDefault(); // the browser would empty a search field
        event.target.blur();
      }
      return;
    }
    if (document.querySelector("dialog[open]")) return; // Escape closes a dialog without our help
    if (event.key === "Enter" && event.target.closest("a, button, summary")) return;
    const act = { ...general(app), ...(app.view ? app.view.keys() : {}) }[event.key];
    if (!act) return;
    event.preventDefault();
    act(event);
  });
}

function general(app) {
  const back = () => route.go("browse", route.listValues(route.read().values));
  return {
    "?": help, c: () => app.copy(), o: () => route.go("overview"), g: back, b: back,
    "/": () => {
      const field = document.querySelector("#main input[type=search]");
      if (field) return field.focus();
      back();
      document.querySelector("#main input[type=search]")?.focus();
    },
  };
}

/** The list of keys, in a dialog that Escape closes. */
export function help() {
  const rows = HELP.map(([key, what]) => [h("dt", {}, key.split("  ").map((k) => h("kbd", {}, k))), h("dd", {}, what)]);
  showDialog("Keys", h("dl", { class: "keys" }, rows));
}

/** Show content in a dialog, which is removed from the page when it is closed. */
export function showDialog(title, ...content) {
  const close = h("button", { type: "button", class: "quiet close", "aria-label": "Close",
    onclick: () => dialog.close() }, "×");
  const dialog = h("dialog", { class: "dialog", "aria-label": title }, h("h2", {}, title, close), content);
  document.body.append(dialog);
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  dialog.addEventListener("close", () => dialog.remove());
  dialog.showModal();
}
