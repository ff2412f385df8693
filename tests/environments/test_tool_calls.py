"""Tool calls in text form: they are parsed strictly, and no attempt is left out."""

import copy
import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from renderers.base import ToolCallParseStatus

from mtrl.environments.tool_calls import (
    CLOSE,
    OPEN,
    PROBLEMS,
    describe_tools,
    format_call,
    message_calls,
    parse_calls,
    text_of,
)
from mtrl.utils.strict_json import canonical, strict_loads

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
words = st.text(st.characters(codec="utf-8", exclude_characters="<>"), max_size=9)
calls = st.tuples(st.text(min_size=1, max_size=9), st.dictionaries(st.text(max_size=6), values, max_size=3)).filter(
    lambda call: CLOSE not in json.dumps(call, ensure_ascii=False)
)


@given(st.lists(st.tuples(words, calls), max_size=4), words)
def test_formatted_calls_are_parsed_back(pairs, end):
    text = "".join(before + format_call(*call) for before, call in pairs) + end
    content, found = parse_calls(text)
    assert content == "".join(before for before, _ in pairs) + end
    assert [(call.name, call.arguments) for call in found] == [call for _, call in pairs]
    assert all(call.status == "ok" for call in found)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("", "invalid_json"),
        ("{oops}", "invalid_json"),
        ('{"name": "f", "arguments": {"a": NaN}}', "invalid_json"),
        ('{"name": "f", "arguments": {"a": 1, "a": 2}}', "invalid_json"),
        ('{"name": "f", "name": "g", "arguments": {}}', "invalid_json"),
        ("{'name': 'f', 'arguments': {}}", "invalid_json"),
        ('```json\n{"name": "f", "arguments": {}}\n```', "invalid_json"),
        ("[" * 100_000, "invalid_json"),
        ('{"name": "f", "arguments": {"n": ' + "9" * 5000 + "}}", "invalid_json"),
        ('<tool_call>{"name": "f", "arguments": {}}', "invalid_json"),
        ("[]", "malformed_structure"),
        ("null", "malformed_structure"),
        ('{"name": "f"}', "malformed_structure"),
        ('{"name": "f", "arguments": []}', "malformed_structure"),
        ('{"name": "f", "arguments": "{}"}', "malformed_structure"),
        ('{"name": "f", "arguments": {}, "id": 1}', "malformed_structure"),
        ('{"arguments": {}}', "missing_name"),
        ('{"name": "", "arguments": {}}', "missing_name"),
        ('{"name": null, "arguments": {}}', "missing_name"),
        ('{"name": ["f"], "arguments": {}}', "missing_name"),
    ],
)
def test_malformed_calls_have_a_status(body, status):
    good = format_call("g", {})
    content, found = parse_calls(f"a{good}b{OPEN}{body}{CLOSE}c{good}")
    assert [call.status for call in found] == ["ok", status, "ok"] and content == "abc"
    assert found[1].raw == body and found[1].name is None and status in PROBLEMS


def test_unpaired_tags_are_malformed_calls():
    assert [c.status for c in parse_calls(f'x {OPEN}{{"name": "f", "arguments": {{}}}}')[1]] == ["unclosed_block"]
    text = f'{{"name": "f", "arguments": {{}}}}{CLOSE} and {format_call("g", {})}'
    assert [(c.status, c.name) for c in parse_calls(text)[1]] == [("malformed_structure", None), ("ok", "g")]


@given(st.lists(st.sampled_from([OPEN, CLOSE, "{", "}", '"name"', ":", '"f"', ",", '"arguments"', "x"]), max_size=20))
def test_every_tag_is_a_call_attempt(pieces):
    text = "".join(pieces)
    content, found = parse_calls(text)
    assert OPEN not in content and CLOSE not in content
    assert len(found) >= bool(OPEN in text or CLOSE in text)


def test_statuses_are_those_of_the_renderers():
    assert set(PROBLEMS) == {*ToolCallParseStatus} - {"ok", "unknown_tool"}


def attempt(name, arguments, status="ok", **more):
    return SimpleNamespace(raw="RAW", name=name, arguments=arguments, status=ToolCallParseStatus(status), **more)


def test_attempts_become_calls_of_a_message():
    made = message_calls(
        [
            attempt("f", {"a": 1}),
            attempt("f", None, id="own"),
            attempt("f", {"a": "\ud800"}),
            attempt("g", {}, "unknown_tool"),
            attempt(None, None, "invalid_json"),
            attempt(7, {}),
            attempt("f", {"a": float("nan")}),
            attempt("f", "text"),
        ],
        3,
    )
    assert [call["id"] for call in made] == ["call_3_0", "own", *(f"call_3_{i}" for i in range(2, 8))]
    assert [call["function"] for call in made] == [
        {"name": "f", "arguments": {"a": 1}},
        {"name": "f", "arguments": {}},
        {"name": "f", "arguments": {"a": "?"}},
        {"name": "g", "arguments": {}},
        {"name": "", "arguments": "RAW"},
        {"name": "", "arguments": "RAW"},
        {"name": "f", "arguments": "RAW"},
        {"name": "f", "arguments": "text"},
    ]
    assert [call.get("malformed") for call in made] == [
        *[None] * 4, "invalid_json", "missing_name", "invalid_json", None,
    ]  # fmt: skip
    json.dumps(made).encode()


def test_messages_are_written_as_text():
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"a": "é"}}}
    written = '<tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call>'
    assert text_of({"role": "assistant", "content": None, "tool_calls": [call]}) == written
    assert text_of({"role": "assistant", "content": "x", "tool_calls": [call, call]}) == "x" + written * 2
    verbatim = '<tool_call>{"name":"f",   "arguments":{"a":"é"}}</tool_call>'
    assert text_of({"role": "assistant", "content": verbatim, "tool_calls": [call]}) == verbatim
    broken = {"function": {"name": "", "arguments": "{oops"}}
    assert text_of({"role": "assistant", "content": "", "tool_calls": [broken]}) == f"{OPEN}{{oops{CLOSE}"
    assert text_of({"role": "tool", "content": "46"}) == "46"


@pytest.mark.parametrize(("levels", "status"), [(90, "ok"), (120, "invalid_json"), (700, "invalid_json")])
def test_deeply_nested_arguments_are_malformed(levels, status):
    text = format_call("f", {}).replace(": {}", f': {{"a": {"[" * levels}{"]" * levels}}}')
    _, (call,) = parse_calls(text)
    assert call.status == status
    deep = json.loads("[" * levels + "]" * levels)
    (made,) = copy.deepcopy(message_calls([attempt("f", {"a": deep})], 0))
    assert made.get("malformed", "ok") == status


def test_the_description_contains_the_schemas_and_a_parsable_form():
    schemas = [{"type": "function", "function": {"name": "f", "description": "Ä", "parameters": {}}}]
    text = describe_tools(schemas)
    assert json.loads(text.split("<tools>\n")[1].split("\n</tools>")[0]) == schemas[0]
    (call,) = parse_calls(text)[1]
    assert (call.status, call.name) == ("ok", "<tool>")


@given(values)
def test_canonical_json_is_one_text_per_value(value):
    text = canonical(value)
    assert canonical(strict_loads(text)) == text == canonical(json.loads(json.dumps(value)))


@pytest.mark.parametrize("text", ["", "NaN", "[1,]", '{"a": 1, "a": 1}', "[" * 100_000, "1 2", "-Infinity"])
def test_strict_json_refuses_invalid_text(text):
    with pytest.raises(ValueError):
        strict_loads(text)
