/* View of one trajectory: its conversation, its rewards and its tokens. */

import { turnBody, turnHead, messageView } from "./conversation.js";
import { source } from "./data.js";
import * as dom from "./dom.js";
import * as format from "./format.js";
import { listed, locate } from "./pages.js";
import { COLOURINGS, legend } from "./paint.js";
import * as route from "./route.js";
import { side } from "./side.js";
import { outcome, scoreCell, verdictMark } from "./summary.js";
import { details, TokenFlow } from "./tokens.js";
import * as visible from "./visible.js";

const { h } = dom;

/** Reward of a full bar: the largest |reward| of the turns, the components and the group. */
function mostPaid({ turns, summary, group }) {
  const rewards = [...turns, ...(group || [])].map((each) => each.reward || 0);
  return Math.max(0, ...[...rewards, ...Object.values(summary.components)].map(Math.abs));
}

export class TrajectoryView {
  constructor(app) {
    this.app = app;
    this.element = h("section", { class: "trajectory", "aria-label": "Trajectory" });
    this.acts = Promise.resolve();
    this.waiting = 0;
  }

  async open(values) {
    this.values = values;
    this.run = this.app.run(values.run);
    const key = `${this.run.id}\n${values.at}`;
    if (key !== this.key) await (this.loading = this.load(key));
    else if (this.whole) this.apply();
  }

  async load(key) {
    this.key = key;
    this.whole = null;
    const [file, line] = route.parts(this.values.at);
    if (!this.element.childElementCount) dom.replace(this.element, dom.note("Reading the trajectory…", "loading"));
    try {
      const whole = await source.trajectory(this.run.id, file, line);
      if (key !== this.key) return;
      this.draw(whole);
    } catch (error) {
      if (key === this.key) dom.replace(this.element, this.crumbs(), dom.note(error.message, "error"));
    }
  }

  draw(whole) {
    if (this.flow) this.flow.close();
    this.whole = whole;
    this.shown = null;
    const most = Math.max(0, ...(whole.group || []).map((s) => Math.abs(s.advantage || 0)));
    this.flow = new TokenFlow(whole.turns, most, { look: (token) => this.look(token),
      pick: (token) => this.pick(token) });
    this.most = mostPaid(whole);
    this.position = h("span", { class: "position" });
    this.modes = h("div", { class: "segments", role: "group", "aria-label": "Show" });
    this.colours = h("div", { class: "colours" });
    this.turns = h("div", { class: "turns" });
    this.token = h("section", { class: "token-details card", "aria-label": "Token", "aria-live": "polite" });
    const s = whole.summary;
    const headline = h("span", { class: "headline" }, `reward ${format.number(s.reward)}`, scoreCell(s),
      verdictMark(s), outcome(s));
    const steps = h("div", { class: "walk" }, this.position, this.step("k", -1, "‹ Previous"),
      this.step("j", 1, "Next ›"));
    dom.replace(this.element, h("div", { class: "toolbar" }, this.crumbs(), headline, steps),
      h("div", { class: "trajectory-bar toolbar" }, this.modes, this.colours),
      h("div", { class: "trajectory-main" }, this.turns, h("aside", { class: "side" }, this.token,
        side(whole, this.run, this.values, this.most))));
    this.apply();
    this.locating = this.locate();
  }

  crumbs() {
    const s = this.whole && this.whole.summary, state = route.listValues(this.values);
    const back = h("a", { class: "crumb", href: route.link("browse", state) }, "‹ List");
    if (!s) return h("nav", { class: "crumbs" }, back);
    return h("nav", { class: "crumbs", "aria-label": "Location" }, back,
      h("a", { href: route.link("browse", { run: this.run.id, level: "groups", step: s.step, kind: s.kind }) },
        `step ${format.number(s.step)}, ${format.words(s.kind)}`),
      h("a", { href: route.link("group", { ...state, of: route.place(s.file, s.group) }) }, visible.line(s.task, 60)),
      h("span", { "aria-current": "page" }, `#${s.index}`));
  }

  step(key, move, text) {
    return h("button", { type: "button", class: "button", title: `${text} (${key})`,
      onclick: () => this.soon(() => this.go(move)) }, text);
  }

  /** Apply the values of the address: conversation or tokens, colours, turn, token. */
  apply() {
    const { show, turn, token } = this.values;
    const mode = show === "tokens" || token !== undefined ? "tokens" : "conversation";
    const colouring = COLOURINGS.some(([name]) => name === this.values.colour) ? this.values.colour : this.usual();
    this.drawModes(mode, colouring);
    if (this.shown !== mode) this.drawTurns(mode);
    this.flow.colour(colouring);
    const chosen = token === undefined ? null : this.flow.token(Number(turn), Number(token));
    this.flow.choose(chosen);
    this.look(null);
    this.settle(turn, chosen, mode);
  }

  /** Scroll to the turn or token of the address once, so that later changes of colour do not scroll the page. */
  settle(turn, chosen, mode) {
    const place = `${this.key}\n${turn}\n${this.values.token}\n${mode}`;
    if (place === this.settled) return;
    const other = this.settled === undefined || !this.settled.startsWith(this.key + "\n");
    this.settled = place;
    const target = chosen ? this.flow.spanOf(chosen) : turn ? dom.byId(`turn-${turn}`) : null;
    this.turns.querySelectorAll(".turn.current").forEach((element) => element.classList.remove("current"));
    dom.byId(`turn-${turn}`)?.classList.add("current");
    if (!target) return other ? window.scrollTo(0, 0) : undefined;
    const box = target.getBoundingClientRect(),
      top = this.element.querySelector(".trajectory-bar").getBoundingClientRect().bottom;
    if (chosen && box.top > top && box.bottom < innerHeight) return undefined;
    const go = () => target.scrollIntoView({ block: chosen ? "center" : "start" });
    go();
    return requestAnimationFrame(go); // newly visible blocks may have changed the heights above
  }

  usual() {
    if (this.whole.turns.some((turn) => turn.advantage !== null)) return "advantage";
    return this.whole.turns.some((turn) => turn.action.tokens.logprobs) ? "logprob" : "by";
  }

  drawModes(mode, colouring) {
    dom.replace(this.modes, ["conversation", "tokens"].map((name) => h("button",
      { type: "button", id: `show-${name}`, "aria-pressed": String(name === mode),
      onclick: () => route.change({ show: name === "tokens" ? name : null, token: null }) },
        name[0].toUpperCase() + name.slice(1))));
    const choices = COLOURINGS.map(([name, title, about], i) => h("button",
      { type: "button", id: `colour-${name}`, title: `${about} (${i + 1})`,
      "aria-pressed": String(name === colouring), onclick: () => route.change({ colour: name, show: "tokens" }) },
        title));
    if (mode !== "tokens") return dom.replace(this.colours);
    return dom.replace(this.colours, h("div", { class: "segments", role: "group",
      "aria-label": "Colour the tokens by" }, choices), legend(colouring, this.flow.all, this.flow.most));
  }

  drawTurns(mode) {
    this.shown = mode;
    const { whole } = this;
    this.element.classList.toggle("with-tokens", mode === "tokens");
    const body = (turn) => (mode === "tokens" ? this.flow.box(turn.number) : turnBody(turn));
    const end = whole.final_observation.length ? h("article", { class: "turn end" },
      h("header", { class: "turn-head" }, h("h2", {}, "After the last turn"),
      h("span", { class: "fact dim" }, "never shown to the model")),
        h("div", { class: "turn-body" }, whole.final_observation.map((m) => messageView(m)))) : null;
    this.flow.clear();
    dom.replace(this.turns, whole.problem ? [dom.note(visible.plain(whole.problem), "error"),
      whole.raw ? h("pre", { class: "text" }, visible.nodes(whole.raw)) : null] : null,
      mode === "tokens" && whole.tokens === "ids" ? dom.note("The run stored no tokenizer: tokens are ids.") : null,
      whole.turns.map((turn) => h("article", { class: "turn", id: `turn-${turn.number}`,
        "aria-label": `Turn ${turn.number}` }, turnHead(turn, this.most), body(turn))),
      end, whole.turns.length || whole.problem ? null : dom.note("This episode has no turns."));
  }

  /** Show the data of a token; those of the chosen token if the pointer is on none. */
  look(token) {
    const shown = token || this.flow.chosen;
    this.token.hidden = this.shown !== "tokens";
    if (!shown) return dom.replace(this.token, h("h3", {}, "Token"),
      h("p", { class: "dim" },
      "Point at a token, or reach it by Tab and the arrow keys. A click selects it here and in the link."));
    const close = this.flow.chosen ? h("button", { type: "button", class: "quiet close",
      "aria-label": "Deselect the token", onclick: () => route.change({ token: null, show: "tokens" }) }, "×") : null;
    return dom.replace(this.token, h("h3", {}, shown === this.flow.chosen ? "Selected token" : "Token", close),
      details(shown, this.place(shown)));
  }

  /** Position of a token in its context, which begins at the last turn whose observation is the whole context. */
  place(token) {
    let position = token.index, turn = this.whole.turns[token.turn - 1];
    while (turn.number > 1 && !turn.observation.whole_context) {
      turn = this.whole.turns[(turn.parent || turn.number - 1) - 1];
      position += this.flow.turns.get(turn.number).length;
    }
    return { position };
  }

  pick(token) {
    const same = this.flow.chosen === token;
    route.change({ turn: token.turn, token: same ? null : token.index, show: "tokens" },
      this.flow.chosen !== null && this.flow.chosen !== undefined);
  }

  /** Find this trajectory in the list of the address, through which next and previous walk. */
  async locate() {
    const { key } = this, s = this.whole.summary;
    this.list = listed(this.run.id, this.values, (moved = 0) => {
      if (this.index >= 0) this.index += moved;
    });
    this.list.anchor = () => this.index;
    this.index = await locate(this.list, s, this.values).catch(() => -1);
    if (key !== this.key) return;
    if (this.index >= 0) {
      this.list.at = this.index;
      this.drawPosition();
      if (this.list.running) this.list.running.then(() => key === this.key && this.drawPosition());
      for (const near of [1, -1]) this.neighbour(near).then((t) => t && source.live && source.trajectory(this.run.id,
        t.file, t.line)).catch(() => {});
    } else dom.replace(this.position, "walking its group");
  }

  drawPosition() {
    dom.replace(this.position, `${format.number(this.index + 1)} of ${format.number(this.list.total)}`);
  }

  async neighbour(move) {
    if (this.index >= 0) return this.list.item(this.index + move);
    return move > 0 ? this.whole.next : this.whole.previous;
  }

  async go(move) {
    const { key } = this;
    await this.locating; // until then the index is that of the trajectory before
    const next = key === this.key ? await this.neighbour(move) : null;
    if (key !== this.key || this.closed) return;
    if (!next) return this.app.notify(move > 0 ? "This is the last trajectory." : "This is the first trajectory.");
    const { turn, token, ...rest } = this.values;
    route.go("trajectory", { ...rest, at: route.place(next.file, next.line) });
  }

  turn(move) {
    const now = Number(this.values.turn || 0), next = now + move;
    if (next >= 1 && next <= this.whole.turns.length) route.change({ turn: next, token: null,
      show: this.shown === "tokens" ? "tokens" : null }, true);
  }

  /** Find the new position in a list that has grown; the shown trajectory stays. */
  changed(run, names) {
    if (this.whole && run === this.run.id && names.includes("files")) this.locating = this.locate();
  }

  close() {
    this.closed = true;
    if (this.flow) this.flow.close();
  }

  /**
   * Act when the trajectory is shown, and after the acts of earlier keys: a key that is pressed while the next
   * trajectory is read counts for that one. The repetitions of a held key are dropped while an act waits, so that none
   * follow its release.
   */
  soon(act, repeats = false) {
    if (repeats && this.waiting) return;
    this.waiting += 1;
    this.acts = this.acts.then(() => this.loading).then(() => (this.whole && !this.closed ? act() : null))
      .catch((error) => this.app.notify(error.message)).finally(() => { this.waiting -= 1; });
  }

  keys() {
    const colours = Object.fromEntries(COLOURINGS.map(([name], i) => [String(i + 1),
      () => route.change({ colour: name, show: "tokens" })]));
    const acts = {
      ...colours, j: () => this.go(1), k: () => this.go(-1), n: () => this.turn(1), p: () => this.turn(-1),
      t: () => route.change({ show: this.shown === "tokens" ? null : "tokens", token: null }),
      Escape: () => this.values.token !== undefined && route.change({ token: null, show: "tokens" }),
    };
    return Object.fromEntries(Object.entries(acts).map(([key, act]) => [key,
      (event) => this.soon(act, event.repeat)]));
  }
}
