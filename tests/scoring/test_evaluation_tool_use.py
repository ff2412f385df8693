"""Counts of called tools, from tool calls and from text, including hostile text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrl.scoring.tool_use import MALFORMED, NAMES, OTHERS, ToolUse, tool_use
from tests.evaluation.made import made_episode


def used(trajectory):
    return {tool.name: (tool.calls, tool.errors) for tool in tool_use([trajectory])}


def with_calls(calls, replies):
    trajectory = made_episode("x")
    trajectory.turns[0].message["tool_calls"] = calls
    trajectory.final_observation = replies
    return trajectory


def call(call_id, name, **more):
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": {}}, **more}


def reply(call_id, name, content):
    return {"role": "tool", "tool_call_id": call_id, "name": name, "content": content}


def test_tool_calls_and_their_errors():
    calls = [call("a", "look"), call("b", "look"), call("c", "", malformed="invalid_json"), call("d", "invented")]
    replies = [reply("a", "look", "Error: no"), reply("b", "look", "fine"), reply("d", "unknown", "Error: no tool")]
    assert used(with_calls(calls, replies)) == {"look": (2, 1), MALFORMED: (1, 1), "unknown": (1, 1)}


def test_results_without_ids_answer_the_calls_in_their_order():
    calls = [{"function": {"name": name}} for name in ("look", "look", "open")]
    replies = [{"role": "tool", "content": content} for content in ("fine", "Error: no", "Error: no")]
    assert used(with_calls(calls, replies)) == {"look": (2, 1), "open": (1, 1)}
    assert used(with_calls(calls, replies[:2])) == {"look": (2, 1), "open": (1, 0)}


@pytest.mark.parametrize(
    ("answer", "names"),
    [
        ("<sql>SELECT 1 < 2</sql>", {"sql": (1, 0)}),
        ("<think><sql>a</sql></think><search>b</search>", {"search": (1, 0)}),
        ("<reasoning>r</reasoning><answer>a</answer>", {}),
        ('<tool>{"name": "wiki_search", "args": {}}</tool>', {"wiki_search": (1, 0)}),
        ('<tool_call>{"name": 3}</tool_call>', {"tool_call": (1, 0)}),
        ("<tool>{oops</tool>", {"tool": (1, 0)}),
        ("```bash\nls\n```", {"bash": (1, 0)}),
        ("```mswea_bash_command\nls\n```", {"bash": (1, 0)}),
        ("```json\n{}\n```", {}),
        ("<sql>SELECT 1", {}),
        ("</sql><sql>", {}),
        ("<a><b>x</b></a>", {"b": (1, 0)}),
    ],
)
def test_text(answer, names):
    assert used(made_episode(answer)) == names


def test_errors_of_text_calls_are_in_the_metrics_or_in_the_reply():
    silent, counted, fine = (made_episode("<sql>x</sql>") for _ in range(3))
    silent.final_observation = [{"role": "user", "content": "<observation>error: no such table</observation>"}]
    counted.turns[0].metrics = {"query_errors": 1.0}
    fine.turns[0].metrics = {"query_errors": 0.0}
    fine.final_observation = [{"role": "user", "content": "error: is what the column says"}]
    assert [used(each)["sql"] for each in (silent, counted, fine)] == [(1, 1), (1, 1), (1, 0)]


def test_the_reply_to_a_turn_is_the_observation_of_the_next():
    trajectory = made_episode(["<sql>a</sql>", "<sql>b</sql>"])
    trajectory.turns[1].observation = [{"role": "user", "content": "Error: no"}]
    assert used(trajectory) == {"sql": (2, 1)}


def test_rates_are_over_episodes():
    found = tool_use(
        [made_episode("<sql>a</sql>", turns=3), made_episode("hm"), made_episode("<sql>b</sql>"), made_episode("hm")]
    )
    assert found == [ToolUse("sql", 4, 0, 1.0, 0.5)]


def test_invented_names_are_put_together():
    answer = "".join(f"<t{i}>x</t{i}>" for i in range(100))
    found = tool_use([made_episode(answer)])
    assert len(found) == NAMES + 1
    assert found[-1] == ToolUse(OTHERS, 100 - NAMES, 0, 100 - NAMES, 1.0)


def test_an_episode_with_several_rare_tools_counts_once():
    calls = [call(str(n), f"tool{n}") for n in range(NAMES + 5)]
    found = tool_use([with_calls(calls, []), with_calls(calls[:1], []), with_calls(calls[:1], [])])
    assert found[-1].name == OTHERS and found[-1].calls == 5 and found[-1].episodes == 1 / 3


@given(answer=st.text(alphabet='<>/ab`\n{}"name:', max_size=60))
def test_any_text_is_read(answer):
    for tool in tool_use([made_episode(answer)]):
        assert tool.calls > 0 and tool.name


@pytest.mark.parametrize("answer", ["<a>" * 300_000, "</think>" * 100_000, "```bash\n" * 100_000, "<" * 10**6])
def test_long_text_is_read_at_once(answer):
    """With quadratic time this would take hours."""
    assert len(tool_use([made_episode(answer)])) <= NAMES + 1


def test_a_deep_call_is_none():
    assert used(made_episode("<tool>" + '{"a":' * 1900 + "</tool>")) == {"tool": (1, 0)}
    assert used(made_episode('<tool>{"name": ["x"]}</tool>')) == {"tool": (1, 0)}
    assert used(made_episode("<tool>[1]</tool>")) == {"tool": (1, 0)}
