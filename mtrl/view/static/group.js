/* View of one group: the trajectories of a prompt side by side. */

import { actionText, messageView } from "./conversation.js";
import { source } from "./data.js";
import * as dom from "./dom.js";
import * as format from "./format.js";
import * as route from "./route.js";
import { bar, outcome, scoreCell, verdictMark } from "./summary.js";
import * as visible from "./visible.js";

const { h } = dom;

export class GroupView {
  constructor(app) {
    this.app = app;
    this.element = h("section", { class: "group-view", "aria-label": "Group" });
  }

  async open(values) {
    this.values = values;
    this.run = this.app.run(values.run);
    if (values.of === this.of) return;
    this.of = values.of;
    const [file, group] = route.parts(values.of);
    dom.replace(this.element, dom.note("Reading the group…", "loading"));
    try {
      const { items } = await source.groups(this.run.id, { file, group });
      if (this.of !== values.of) return;
      if (!items.length) return dom.replace(this.element, dom.note("This group is not, or no longer, in the run."));
      await this.draw(items[0]);
    } catch (error) {
      if (this.of !== values.of) return;
      this.of = null; // the next visit reads the group again
      dom.replace(this.element, dom.note(error.message, "error"));
    }
  }

  async draw(group) {
    const most = Math.max(0, ...group.members.map((s) => Math.abs(s.reward || 0)));
    const columns = group.members.map((s) => this.column(s, most));
    const prompt = h("div", { class: "prompt" });
    dom.replace(this.element, this.head(group), prompt,
      h("div", { class: "columns", tabindex: 0, role: "region", "aria-label": "Its trajectories" }, columns));
    const wholes = await Promise.all(group.members.map((s) => source.trajectory(this.run.id, s.file,
      s.line).catch((error) => ({ error }))));
    const first = wholes.find((whole) => whole.turns && whole.turns.length);
    if (first) dom.replace(prompt,
      first.turns[0].observation.messages.map((message) => messageView(message)));
    wholes.forEach((whole, i) => dom.append(columns[i],
      whole.turns ? this.turns(whole) : [dom.note(String(whole.error.message), "error")]));
  }

  head(g) {
    const facts = [`step ${format.number(g.step)}`, format.words(g.kind),
      `reward ${format.fixed(g.reward_mean)} ± ${format.fixed(g.reward_std)}`,
      g.scored ? `${g.successes} of ${g.scored} solved` : "not scored", g.lenient ? `${g.lenient} lenient` : null,
        g.strict ? `${g.strict} strict` : null,
      g.informative === false ? "taught nothing: all its advantages are 0" : null];
    return h("div", { class: "page-head" }, h("a", { class: "crumb",
      href: route.link("browse", { ...route.listValues(this.values), level: "groups" }) }, "‹ Groups"),
      h("h1", {}, visible.line(g.task, 120)), h("p", { class: "facts" }, facts.filter(Boolean).join(" · ")));
  }

  column(s, most) {
    const at = route.link("trajectory", { ...route.listValues(this.values), run: this.run.id,
      at: route.place(s.file, s.line) });
    return h("article", { class: `member-column ${s.verdict || ""}` },
      h("h2", {}, h("a", { href: at }, `#${s.index}`), verdictMark(s)),
      h("dl", { class: "small-facts" },
        h("dt", {}, "Reward"), h("dd", {}, bar(s.reward, most), format.fixed(s.reward)), h("dt", {}, "Score"),
          h("dd", {}, scoreCell(s)),
        h("dt", {}, "Advantage"), h("dd", { class: s.advantage < 0 ? "minus" : s.advantage > 0 ? "plus" : "" },
          format.isNumber(s.advantage) ? format.fixed(s.advantage, 3) : "not recorded"),
        h("dt", {}, "Ended"), h("dd", {}, outcome(s)), h("dt", {}, "Tokens"),
          h("dd", {}, `${format.number(s.tokens)} in ${format.plural(s.turns, "turn")}`)));
  }

  turns(whole) {
    const most = Math.max(0, ...whole.turns.map((t) => Math.abs(t.reward)));
    return whole.turns.map((turn) => h("div", { class: "member-turn" },
      turn.number > 1 ? turn.observation.messages.map((m) => h("p", { class: `excerpt ${visible.plain(m.role)}` },
        visible.line(m.content, 160))) : null,
      h("p", { class: "excerpt action" }, actionText(turn)), h("p", { class: "turn-reward" },
        turn.reward ? bar(turn.reward, most) : null, format.signed(turn.reward))));
  }

  changed() {}
  close() {}

  keys() {
    return {};
  }
}
