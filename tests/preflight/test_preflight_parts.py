"""The parts of the checks: the search for answers, their changes, and the comparisons."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrl.environments.family import Family
from mtrl.preflight.mutations import mutations
from mtrl.preflight.repeats import difference
from mtrl.preflight.responses import FUZZ, final_answers, json_object, nonsense, parts, tag_names
from mtrl.preflight.state import changed, snapshot

TEXT = st.text(max_size=60)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<think>so</think><solution>select 1</solution>", "select 1"),
        ("<think>so</think>", "<think>so</think>"),
        ("<a>1</a> then <b>2</b>.", "2"),
        ("3 * 4 = 12\n#### 12", "12"),
        ("hence \\boxed{x^2}.", "x^2"),
        ("Paris", "Paris"),
        ("", ""),
    ],
)
def test_the_answer_is_found(response, answer):
    found = parts(response)
    assert found.answer == answer
    assert found.with_answer(answer) == response


@given(TEXT)
def test_parts_lose_nothing(response):
    found = parts(response)
    assert found.before + found.answer + found.after == response


@given(TEXT, TEXT)
def test_nothing_breaks_on_any_text(response, wrong):
    assert response not in nonsense(response)
    assert response not in mutations(response, wrong).values()


@pytest.mark.parametrize(
    ("response", "made"),
    [
        ("#### 72", ["#### 05", "#### 987654321"]),
        ('<out>{"a": "x", "b": 1}</out>', ['<out>{"a": "zq", "b": "zq"}</out>']),
        ("<sql>select a from b</sql>", ["<sql>zq zq zq zq</sql>", "<sql>zq</sql>"]),
    ],
)
def test_nonsense_keeps_the_form(response, made):
    assert nonsense(response) == made


def test_mutations_change_tags_markers_and_fields():
    tagged = mutations('<think>so</think><final_output>{"a": "b"}</final_output>')
    assert (
        tagged["<final_response> for <final_output>"] == '<think>so</think><final_response>{"a": "b"}</final_response>'
    )
    assert tagged["<FINAL_OUTPUT>"].endswith("</FINAL_OUTPUT>")
    assert json_object(parts(tagged["a field too many"]).answer) == {"a": "b", "zq": "zq"}
    marked = mutations("so\n#### 72", "#### 71")
    assert marked["\\boxed{} for ####"] == "so\n\\boxed{72}"
    assert marked["a wrong answer after it"] == "so\n#### 72\n#### 71"
    assert marked["both answers in one"] == "so\n#### 71 or 72"


def test_other_rows_answers_take_the_place_of_the_own():
    assert final_answers("<a>1</a>", ["<a>2</a>", "<a>2</a>", "#### 3"]) == ["<a>2</a>", "<a>3</a>"]


def test_the_fuzz_is_of_different_texts():
    assert len(set(FUZZ)) == len(FUZZ) > 30
    assert tag_names("<a>x</a><b>y</b><a>z</a><c>") == ["a", "b"]


def turn(**fields):
    return {"observation": [{"role": "user", "content": "hello there"}], "reward": 0.0, **fields}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            [turn(observation=[{"role": "user", "content": "hello here"}]), turn()],
            "opening: 'hello there' / 'hello here'",
        ),
        (
            [turn(), turn(observation=[{"role": "user", "content": "hello"}])],
            "observation after turn 1: 'hello there' /",
        ),
        ([turn(), turn(observation=[{"role": "tool", "content": "hello there"}])], '"role": "tool"'),
        ([turn(reward=0.5), turn()], "reward of turn 1: '0.0' / '0.5'"),
        ([turn()], "1 turns, then 0"),
    ],
)
def test_the_first_difference_is_described(other, said):
    assert said in difference([turn(), turn()], other)


def test_state_is_that_of_classes_and_modules():
    from tests.preflight.broken import leaky_class

    family: Family = leaky_class.FAMILY
    before = snapshot(family)
    assert "tests.preflight.broken.sound.CODES" in before
    leaky_class.Leaky.seen.append("x")
    try:
        assert changed(before, snapshot(family)) == ["tests.preflight.broken.leaky_class.Leaky.seen"]
    finally:
        leaky_class.Leaky.seen.pop()
    assert not changed(before, snapshot(family))
    assert not [name for name in before if json.dumps(name).startswith('"mtrl.')]


def test_a_deep_answer_is_no_json_object():
    assert json_object('{"a": ' + "[" * 100_000) is None
