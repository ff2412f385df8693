/* Conversation of a trajectory, turn by turn. All content is inserted as text. */

import { h } from "./dom.js";
import * as format from "./format.js";
import { bar } from "./summary.js";
import * as visible from "./visible.js";

const DEEP = 40;
const LONG = 6000; // maximum characters of a message that are shown at first

/** Upper bound of the nesting depth of brackets; brackets in strings count too. */
function depth(text) {
  let now = 0, most = 0;
  for (const [bracket] of text.matchAll(/[[\]{}]/g)) {
    now = Math.max(0, now + ("[{".includes(bracket) ? 1 : -1));
    most = Math.max(most, now);
  }
  return most;
}

/** JSON with indentation; null if the text is not JSON or is nested too deeply for indentation. */
function pretty(text) {
  if (!/^\s*[[{]/.test(text) || depth(text) > DEEP) return null;
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return null;
  }
}

/** Text with its line breaks. A long text is cut and has a button for the rest. */
export function textView(text) {
  const short = visible.start(text, LONG), rest = text.slice(short.length);
  const box = h("div", { class: "text" }, visible.nodes(short));
  if (rest) {
    box.append(h("button", { type: "button", class: "quiet more",
      onclick: (event) => event.target.replaceWith(...visible.nodes(rest)) },
      `… show the other ${format.number(rest.length)} characters`));
  }
  return box;
}

function callView(call) {
  const text = pretty(call.arguments) || call.arguments;
  return h("div", { class: "call" }, h("span", { class: "call-name" }, visible.plain(call.name)),
    h("pre", {}, visible.nodes(text)));
}

/** One message: its role, its text and its tool calls. */
export function messageView(message) {
  const text = message.role === "tool" ? pretty(message.content) || message.content : message.content;
  const calls = message.tool_calls || [];
  return h("div",
    { class: `message ${["system", "user", "assistant", "tool"].includes(message.role) ? message.role : "other"}` },
    h("div", { class: "role" }, visible.plain(message.role),
      message.name ? h("b", {}, ` ${visible.plain(message.name)}`) : null),
    message.reasoning ? h("details", { class: "reasoning", open: true }, h("summary", {}, "Reasoning"),
      textView(message.reasoning)) : null,
    (message.images || []).map((src) => h("img", { class: "picture", src, alt: "image of the message" })),
    text ? textView(text) : calls.length || message.reasoning ? null : h("div", { class: "text nothing" }, "(empty)"),
    calls.map(callView));
}

/** Short form of a turn's response: its tool calls if there are any, else its text. */
export function actionText(turn) {
  const calls = turn.action.message.tool_calls || [];
  if (!calls.length) return visible.nodes(turn.action.text);
  return calls.map((call) => h("span", { class: "call-line" }, visible.line(`${call.name}(${call.arguments})`, 200)));
}

/** Header of a turn: its reward, duration, policy versions, and whether it was trained on. */
export function turnHead(turn, most) {
  const parts = Object.entries(turn.components).map(([name,
    value]) => `${visible.plain(name)} ${format.signed(value)}`);
  const versions = turn.versions.map(([version,
    count]) => (turn.versions.length > 1 ? `v${version} (${count})` : `v${version}`)).join(", ");
  const facts = [`${format.plural(turn.action.tokens.ids.length, "token")}`, versions && `policy ${versions}`,
    `${format.seconds(turn.seconds_generate)} + ${format.seconds(turn.seconds_environment)}`];
  return h("header", { class: "turn-head" }, h("h2", {}, `Turn ${turn.number}`),
    h("span", { class: "turn-sum", title: parts.join("\n") || "Reward of this turn" },
      bar(turn.reward, most, `reward ${format.number(turn.reward)}`),
      h("b", {}, format.signed(turn.reward)), h("small", {}, parts.join(", "))),
    format.isNumber(turn.advantage) ? h("span",
      { class: `fact ${turn.advantage < 0 ? "minus" : turn.advantage > 0 ? "plus" : ""}`,
      title: "Mean advantage of its tokens" }, `adv. ${format.signed(Number(turn.advantage.toPrecision(3)))}`) : null,
    turn.cut ? h("span", { class: "flag", title: "The engine stopped the turn at a token limit" }, "✂ cut") : null,
    turn.summary ? h("span", { class: "flag",
      title: "The policy summarised the conversation; the environment did not receive this turn" }, "summary") : null,
    turn.break ? h("span", { class: "flag",
      title: "The context does not extend the previous tokens: a new sample starts here" },
      turn.break === "fold" ? "context folded" : `context broken: ${visible.plain(turn.break)}`) : null,
    turn.parent ? h("span", { class: "fact", title: "The context extends the tokens of that turn" },
      `goes on from turn ${turn.parent}`) : null,
    turn.untrained ? h("span", { class: "fact dim", title: visible.plain(turn.untrained) }, "not trained") : null,
    h("span", { class: "fact dim",
      title: "Sampled tokens, policy version, seconds to generate + in the environment" },
      facts.filter(Boolean).join(" · ")));
}

/** Body of a turn: its observation and the response of the model. */
export function turnBody(turn) {
  const { text } = turn.action;
  const same = turn.action.message.content === text;
  // Content that is the whole sampled text repeats the calls, which are shown separately.
  const message = same && turn.action.message.tool_calls.length ? { ...turn.action.message,
    content: "" } : turn.action.message;
  const raw = message.tool_calls.length || message.reasoning || !same;
  return h("div", { class: "turn-body" }, turn.observation.messages.map((m) => messageView(m)),
    turn.observation.whole_context ? h("p", { class: "note" },
      "The context of this turn is shown as a whole, because it does not extend earlier tokens.") : null,
      messageView(message),
    raw && text ? h("details", { class: "raw" }, h("summary", {}, "The response as it was sampled"),
      textView(text)) : null);
}
