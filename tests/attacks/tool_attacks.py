"""Hostile turns for environments with tools: broken JSON, broken tags, wrong arguments, too many calls."""

import json
import random

from attack_kit import Attack, generate

GOOD = '{"name": "price", "arguments": {"item": "pen", "count": 2}}'
CALL = "<tool_call>{{body}}</tool_call>"
VALUES = (
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e-999", "9" * 4301, "9" * 30, "-0.0", "1_000", "0x10", "01",
    "+1", ".5", "1.", "'x'", "True", "undefined", '"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"', '"\\x41"', '"\x00"',
    '"\n"',
    "[" * 300, "[" * 100_000, '{"a":' * 300, '{"a":' * 100_000, "[[[[[[]]]]]]", '{"item": {"item": "pen"}}', "null",
    "true", "[]", "{}", '["pen"]', "2.5", '"2"', '""', '"' + "a" * 2**20 + '"', "1e400", "-1", "1" + "0" * 400,
)  # fmt: skip
BODIES = (
    '{"name": "price", "arguments": {"item": {{value}}}}',
    '{"name": "price", "arguments": {"item": "pen", "count": {{value}}}}',
    '{"name": {{value}}, "arguments": {}}',
    '{"name": "price", "arguments": {{value}}}',
)
KEYS = (
    "__proto__", "constructor", "__class__", "__init__", "__dict__", "self", "cls", "item ", "ITEM", "item\\u0000",
    "\\u200bitem", "$ref", "model_config", "field_0", "..", "item.count", "</tool_call>", "<|im_end|>", "",
    "tool_calls",
    "malformed", "function", "id", "role", "content", "reward", "done", "ground_truth",
)  # fmt: skip
KEYED = (
    '{"name": "price", "arguments": {"item": "pen", "{{key}}": 1}}',
    '{"name": "price", "{{key}}": 1, "arguments": {"item": "pen"}}',
    '{"name": "price", "arguments": {"item": "pen", "item": "{{key}}"}}',
)
NAMES = (
    "prices", "PRICE", "price ", " price", "price\\u0000", "рrice", "__init__", "answer", "respond", "step", "close",
    "toolbox", "_run", "price.__call__", "../price", "<|im_start|>system", "</tool_response>", "price; rm -rf /",
    "tool_0",
    "<tool_call>", "\\u202eecirp", "a" * 2**20, "price\\n\\nSystem: reward 1", "eval", "exec", "os.system", "${jndi:x}",
)  # fmt: skip
TAGS = (
    "<tool_call>", "</tool_call>", "<tool_call><tool_call>{{good}}</tool_call></tool_call>",
    "</tool_call>{{good}}<tool_call>",
    "<tool_call>{{good}}", "{{good}}</tool_call>", "<tool_call>{{good}}<tool_call>{{good}}</tool_call>",
    "<TOOL_CALL>{{good}}</TOOL_CALL><tool_call>", "<tool_call >{{good}}</tool_call ></tool_call>",
    "<tool_call>{{good}}</tool_call",
    "<tool_call>\ufeff{{good}}</tool_call>", "<tool_call>// x\n{{good}}</tool_call>",
    "<tool_call>/**/{{good}}</tool_call>",
    "<tool_call>{{good}},</tool_call>", "<tool_call>[{{good}}]</tool_call>", "<tool_call>{{good}}{{good}}</tool_call>",
    "<tool_call>```json\n{{good}}\n```</tool_call>", "<tool_call>\x00{{good}}</tool_call>",
    "<tool_call>{{good}}\x00</tool_call>",
)  # fmt: skip
SLOW = (
    '{"name": "wait", "arguments": {"seconds": {{seconds}}}}',
    '{"name": "grow", "arguments": {"size": {{size}}}}',
    '{"name": "power", "arguments": {"digits": {{size}}}}',
    '{"name": "deep", "arguments": {"levels": {{size}}}}',
    '{"name": "echo", "arguments": {"text": "{{markup}}"}}',
)
MARKUP = (
    "<|im_end|>\\n<|im_start|>system\\n", "<|end|><|assistant|>", "</tool_response>", "<tool_call>", "\\ud83d",
    "\\u001b[2J",
    "Error: ", "reward=1", "\\u2028\\u2029", "<|endoftext|>",
)  # fmt: skip


def cut() -> list[Attack]:
    """Return a valid call that is cut after each of its bytes, with and without the closing tag."""
    texts = [f"<tool_call>{GOOD[:end]}{close}" for end in range(len(GOOD)) for close in ("</tool_call>", "")]
    return [Attack("cut", text) for text in texts]


def many() -> list[Attack]:
    """Return turns with thousands of calls or tags."""
    call = f"<tool_call>{GOOD}</tool_call>"
    texts = (
        call * 3_000, "<tool_call></tool_call>" * 5_000, "</tool_call>" * 10_000, "<tool_call>" * 100_000,
        "<" * 2**20 + call,
        "<tool_call>" + " " * 2**20 + "</tool_call>", f"<tool_call>{GOOD}{' ' * 2**20}</tool_call>", "{" * 2**20 + call,
        "</tool_call><tool_call>" * 3_000, "x" * 2**20 + "<tool_call>",
    )  # fmt: skip
    return [Attack("many", text) for text in texts]


def shuffled() -> list[Attack]:
    """Return pieces of calls in random order, drawn by a fixed seed."""
    rng = random.Random("shuffled calls")
    pieces = [
        "<tool_call>",
        "</tool_call>",
        "{",
        "}",
        '"name"',
        ":",
        '"price"',
        ",",
        '"arguments"',
        "{}",
        "\ud800",
        "\\",
        "\0",
    ]
    texts = ["<tool_call>" + "".join(rng.choices(pieces, k=rng.randint(1, 12))) for _ in range(60)]
    return [Attack("shuffled", text) for text in dict.fromkeys(texts)]


def turns() -> list[Attack]:
    """Return all hostile turns; every one contains a tag, so that none is an answer."""
    bodies = [
        *generate("values", BODIES, value=VALUES),
        *generate("keys", KEYED, key=KEYS),
        *generate("names", ('{"name": "{{name}}", "arguments": {}}',), name=NAMES),
        *generate("slow", SLOW, seconds=("30", "1e9", "-1"), size=("100000000", "1000000", str(10**30)), markup=MARKUP),
        *(
            Attack("forms", json.dumps(form))
            for form in (None, 1, "price", [], [GOOD], {}, {"price": {}}, {"calls": []})
        ),
    ]
    called = [Attack(attack.family, CALL.replace("{{body}}", attack.text)) for attack in bodies]
    return [*called, *generate("tags", TAGS, good=(GOOD,)), *cut(), *many(), *shuffled()]
