/* The only place that creates elements. Text is inserted by textContent, so text of a model is never parsed as HTML. */

const SVG = "http://www.w3.org/2000/svg";

/** Create an element: h("a", {class: "x", href: "#", onclick: f, dataset: {step: 3}}, "text", child, [more], null). */
export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Create an SVG element in the same way. */
export function s(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) set(element, name, value);
  append(element, children);
  return element;
}

function set(element, name, value) {
  if (value === null || value === undefined || value === false) return;
  if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
  else if (name === "dataset") Object.assign(element.dataset, value);
  else if (name === "vars") for (const [key, v] of Object.entries(value)) element.style.setProperty(key, v);
  else if (name === "value" || name === "checked" || name === "selected") element[name] = value;
  else element.setAttribute(name, value === true ? "" : String(value));
}

export function append(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(element, child);
    else element.append(child); // strings become text nodes
  }
}

/** Replace the content of an element. The focus stays on the element of the same id, if the new content has one. */
export function replace(element, ...children) {
  const active = document.activeElement;
  const id = active && active !== element && element.contains(active) ? active.id : "";
  element.textContent = "";
  append(element, children);
  if (id) byId(id)?.focus({ preventScroll: true });
  return element;
}

/** Sentence that is shown instead of missing content. */
export function note(text, kind = "empty") {
  return h("p", { class: `note ${kind}`, role: kind === "error" ? "alert" : "status" }, text);
}

export function byId(id) {
  return document.getElementById(id);
}
