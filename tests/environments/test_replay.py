"""Recorded tools: equal calls get equal answers, and calls without a recording get an error."""

import asyncio
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrl.environments.replay import Recordings, ReplayTools, recordings_of_rows
from mtrl.environments.tools import ToolEnvironment, ToolError, tool, toolbox
from mtrl.errors import UserError

LINES = [
    {"tool": "get_account", "arguments": {"id": "A1", "pin": 12}, "result": {"name": "Ann", "tags": ["x"]}},
    {"tool": "get_account", "arguments": {"id": "B2", "pin": 34}, "result": {"name": "Bob", "tags": []}},
    {"tool": "today", "arguments": {}, "result": "1 May"},
    {"tool": "search", "arguments": {"query": "tea"}, "result": None},
    {"tool": "search", "arguments": {"query": "tea", "page": 2}, "result": ["green"]},
]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(st.text(max_size=5), json_values, max_size=4)


@pytest.fixture
def recordings():
    return Recordings(LINES)


@pytest.fixture
def replay(recordings):
    return ReplayTools(recordings)


def run(environment, *calls):
    message = {"role": "assistant", "content": "", "tool_calls": list(calls)}
    result = asyncio.run(environment.respond(message, "", {}))
    return [each["content"] for each in result.observation], result.metrics


def call(name, **arguments):
    return {"type": "function", "id": "c", "function": {"name": name, "arguments": arguments}}


def test_recorded_calls_return_their_results(replay):
    assert replay.call("get_account", pin=12, id="A1") == {"name": "Ann", "tags": ["x"]}
    assert replay.call("today") == "1 May" and replay.call("search", query="tea") is None
    assert replay.calls == {"get_account": 1, "today": 1, "search": 1} and not replay.misses


@pytest.mark.parametrize(
    ("name", "arguments", "knows"),
    [
        ("get_account", {"id": "A1"}, "id, pin"),
        ("get_account", {"id": "A1", "pin": "12"}, "id, pin"),
        ("get_account", {"id": "A1", "pin": True}, "id, pin"),
        ("get_account", {"id": "A1", "pin": 34}, "id, pin"),
        ("get_account", {"id": "A1", "pin": 12, "self": 1, "tool": 2}, "id, pin"),
        ("get_account", {"id": float("nan")}, "id, pin"),
        ("today", {"day": 1}, "none"),
        ("search", {}, "query, page"),
    ],
)
def test_calls_without_a_recording_are_tool_errors(replay, name, arguments, knows):
    """The error names arguments and never a value, and is equal for every wrong call."""
    with pytest.raises(ToolError) as caught:
        replay.call(name, **arguments)
    assert str(caught.value) == f"{name} has no result for these arguments; the arguments that it knows are: {knows}"
    assert replay.calls == replay.misses == {name: 1}


def test_results_cannot_be_changed(recordings):
    ReplayTools(recordings).call("get_account", id="A1", pin=12)["tags"].append("mine")
    assert ReplayTools(recordings).call("get_account", id="A1", pin=12)["tags"] == ["x"]


@given(st.lists(st.tuples(st.sampled_from("ab"), arguments, json_values), min_size=1, max_size=8), st.randoms())
def test_every_recording_is_found_whatever_the_order_of_its_keys(entries, rng):
    seen, lines = {}, []
    for name, given_arguments, result in entries:
        key = (name, json.dumps(json.loads(json.dumps(given_arguments)), sort_keys=True))
        if key in seen or any(isinstance(leaf, float | bool) for leaf in _leaves(given_arguments)):
            continue
        seen[key] = result
        lines.append({"tool": name, "arguments": given_arguments, "result": result})
    if not lines:
        return
    recordings = Recordings(lines)
    for line in lines:
        shuffled = list(line["arguments"].items())
        rng.shuffle(shuffled)
        found = recordings.find(line["tool"], dict(shuffled))
        assert json.dumps(found) == json.dumps(line["result"])
    assert len(recordings) == len(lines)


def _leaves(value):
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)
    else:
        yield value


def test_integers_and_integral_floats_are_the_same_argument():
    recordings = Recordings([{"tool": "t", "arguments": {"n": 1.0, "deep": [{"m": 2}]}, "result": 1}])
    assert recordings.find("t", {"n": 1, "deep": [{"m": 2.0}]}) == 1
    for other in (True, "1", 1.5):
        with pytest.raises(KeyError):
            recordings.find("t", {"n": other, "deep": [{"m": 2}]})


# -- files and tables -------------------------------------------------------------------------------------------------


def test_recordings_are_read_from_a_file(tmp_path):
    file = tmp_path / "r.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in LINES) + "\n\n", encoding="utf-8")
    assert Recordings.from_jsonl(file).tools == ["get_account", "today", "search"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "recordings .*r.jsonl do not exist; give a JSONL file"),
        ("", "holds no recordings"),
        ('{"tool": "t", "arguments": {}, "result": 1}\n{oops', "line 2, is not JSON"),
        ("[1]", "line 1, is no recording; it needs tool"),
        ('{"tool": "t", "arguments": {}}', "line 1, is no recording; it needs tool"),
        ('{"tool": "t", "arguments": "x", "result": 1}', "line 1, is no recording"),
        ('{"tool": "t", "arguments": {"a": 1, "a": 2}, "result": 1}', "line 1, is not JSON .a key occurs twice"),
        (
            '{"tool": "t", "arguments": {"a": 1}, "result": 1}\n{"tool": "t", "arguments": {"a": 1.0}, "result": 2}',
            "line 2, answers a call of t otherwise than a line before",
        ),
    ],
)
def test_broken_files_are_user_errors(tmp_path, text, message):
    file = tmp_path / "r.jsonl"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        Recordings.from_jsonl(file)


def test_duplicate_recordings_count_once():
    assert len(Recordings([LINES[0], LINES[0]])) == 1


ROWS = [
    {"account_id": "A1", "state": "open", "balance": 5, "secret": "s"},
    {"account_id": "B2", "state": "closed", "balance": 0, "secret": "t"},
]


def test_table_rows_become_recordings():
    replay = ReplayTools(Recordings(recordings_of_rows("validate", ROWS, ["account_id"], ["state", "balance"])))
    assert replay.call("validate", account_id="B2") == {"state": "closed", "balance": 0}
    renamed = recordings_of_rows("validate", ROWS, {"accountId": "account_id"}, ["state"])
    assert ReplayTools(Recordings(renamed)).call("validate", accountId="A1") == {"state": "open"}
    with pytest.raises(UserError, match="row 1 of the recordings of validate has no column missing"):
        recordings_of_rows("validate", ROWS, ["account_id"], ["missing"])
    twice = [*ROWS, {**ROWS[0], "state": "frozen"}]
    with pytest.raises(UserError, match="line 3, answers a call of validate otherwise"):
        Recordings(recordings_of_rows("validate", twice, ["account_id"], ["state"]))


# -- in an environment ------------------------------------------------------------------------------------------------


def test_schemas_are_inferred_from_the_recordings(recordings):
    account, _, search = (recordings.schema(name)["function"]["parameters"] for name in recordings.tools)
    assert account["properties"] == {"id": {"type": "string"}, "pin": {"type": "integer"}}
    assert account["required"] == ["id", "pin"]
    assert search["required"] == ["query"] and list(search["properties"]) == ["query", "page"]
    mixed = Recordings([{"tool": "t", "arguments": {"a": value}, "result": 0} for value in (1, 1.5, "x")])
    assert mixed.schema("t")["function"]["parameters"]["properties"] == {"a": {}}


def test_recorded_tools_in_an_environment(recordings):
    class Support(ToolEnvironment):
        def reset(self, row=None):
            super().reset(row)
            self.replay = ReplayTools(recordings)
            self.toolbox |= toolbox(*self.replay.tools())

    environment = Support()
    environment.reset()
    texts, metrics = run(
        environment, call("get_account", id="A1", pin=12), call("search", q="x"), call("today"), call("get_acount")
    )
    assert texts == [
        '{"name": "Ann", "tags": ["x"]}',
        "Error: search has no result for these arguments; the arguments that it knows are: query, page",
        "1 May",
        "Error: there is no tool get_acount; did you mean get_account? The tools are: get_account, today, search",
    ]
    assert metrics["tool_errors"] == 2 and environment.replay.misses == {"search": 1}
    environment.close()


def test_typed_tools_can_call_the_recordings(recordings):
    class Support(ToolEnvironment):
        @tool
        def get_account(self, id: str, pin: int) -> dict:
            """The account of an id."""
            return ReplayTools(recordings).call("get_account", id=id, pin=pin)

        @tool
        def unknown(self) -> str:
            """A tool without recordings."""
            return ReplayTools(recordings).call("unknown")

    environment = Support()
    texts, _ = run(environment, call("get_account", id="A1", pin=12.0), call("get_account", id="A1"))
    assert texts == ['{"name": "Ann", "tags": ["x"]}', "Error: wrong arguments for get_account: pin: Field required"]
    with pytest.raises(UserError, match="tool unknown has no recordings; there are some of get_account, today, search"):
        run(environment, call("unknown"))
    environment.close()


def test_given_schemas_replace_the_inferred_ones(replay):
    schema = {"type": "function", "function": {"name": "today", "description": "Now.", "parameters": {}}}
    assert toolbox(*replay.tools([schema]))["today"].schema == schema
    schema["function"]["name"] = "yesterday"
    with pytest.raises(UserError, match="tool yesterday has a schema and no recordings"):
        replay.tools([schema])


def test_the_same_calls_get_the_same_observations(recordings):
    """Observations do not depend on the order of the calls."""
    tries = [call("get_account", id=i, pin=p) for i in ("A1", "B2", "C3") for p in (12, 34)] * 3
    observations = []
    for seed in range(3):
        order = list(range(len(tries)))
        random.Random(seed).shuffle(order)
        environment = ToolEnvironment(max_turns=99, max_tool_calls=99)
        environment.toolbox |= toolbox(*ReplayTools(recordings).tools())
        texts, _ = run(environment, *(tries[i] for i in order))
        observations.append([text for _, text in sorted(zip(order, texts, strict=True))])
        environment.close()
    assert observations[0] == observations[1] == observations[2]
