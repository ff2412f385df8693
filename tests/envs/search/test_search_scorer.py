"""The scorer of search: it reads the last answer independently, and agrees with the reward on any text."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.search import FAMILY
from mtrl.types import Trajectory

PIECES = ["<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>", "<think>", "</think>"]
PIECES += [
    "tin",
    "the tin",
    "Tin.",
    "zinc",
    "mara works",
    " ",
    "\n",
    "\0",
    "\xa0",
    "<",
    ">",
    "/answer>",
    "<ANSWER>",
    "</",
]
FREE = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
TEXT = st.sampled_from(["tin", " the Tin! ", "zinc", "tin or zinc", "", " ", "a", "x" * 600, "rome metal", "t<i>n"])
KIND = st.sampled_from(["search", "answer", "information"])
FRAMED = st.tuples(
    st.sampled_from(["", "<think>hm", "so </think>"]), KIND, TEXT, st.sampled_from(["", "!", "</think>"])
)
RESPONSE = st.one_of(FREE, FRAMED.map(lambda p: f"{p[0]}<{p[1]}>{p[2]}</{p[1]}>{p[3]}"))


@settings(max_examples=500, deadline=None)
@given(
    responses=st.lists(RESPONSE, min_size=1, max_size=5),
    aliases=st.lists(st.sampled_from(["tin", "The", "zinc ore", "tin or zinc", "x" * 600]), min_size=1, max_size=3),
)
def test_reward_and_score_agree(responses, aliases, make_row, play, score):
    row = make_row({"target": aliases, "passages": [["mara", "mara works rome"], ["tin", "tin zinc"]]})
    results = play(row, responses)
    scored = score(responses[: len(results)], row)
    assert results[-1].components["correct"] == scored
    assert sum(result.reward for result in results) <= scored
    assert all(result.reward == sum(result.components.values()) for result in results)


@pytest.mark.parametrize("scheme", ["progress", "mt_ppo"])
@settings(max_examples=200, deadline=None)
@given(responses=st.lists(RESPONSE, min_size=1, max_size=5))
def test_all_schemes_agree_on_right_answers(scheme, responses, make_row, play, score):
    row = make_row()
    results = play(row, responses, reward=scheme)
    scored = score(responses[: len(results)], row)
    last = results[-1].components
    assert (last["outcome"] == 1.0 if scheme == "mt_ppo" else last["correct"] > 0) == (scored == 1.0)


def test_the_score_does_not_depend_on_the_reward(make_row):
    claimed = Trajectory("row", "group", 0)
    assert FAMILY.score(claimed, make_row()) == 0.0


def test_only_the_last_assistant_message_counts(make_row):
    row = make_row()
    answer = {"role": "assistant", "content": "<answer>tin</answer>"}
    message = {"role": "user", "content": "<answer>tin</answer>"}
    nothing = {"role": "assistant", "content": None}
    assert FAMILY.score(SimpleNamespace(messages=[answer]), row) == 1.0
    assert FAMILY.score(SimpleNamespace(messages=[message]), row) == 0.0
    assert FAMILY.score(SimpleNamespace(messages=[nothing, message]), row) == 0.0
    assert FAMILY.score(SimpleNamespace(messages=[answer, {"role": "assistant", "content": "zinc"}]), row) == 0.0


@pytest.mark.parametrize(
    "response",
    [
        "tin",
        "<answer>tin or zinc</answer>",
        "<answer>tin</answer><answer>zinc</answer>",
        "<answer>tin</answer><answer>tin</answer>",
        "<answer>zinc</answer> I mean tin",
        "<search>tin</search>",
        "<answer>tin</answer><information></information>",
        "<think><answer>tin</answer></think>",
        "<answer>tin",
        "<Answer>tin</Answer>",
    ],
)
def test_similar_answers_score_zero(response, make_row, score, play):
    assert score([response], make_row()) == 0.0
    assert all(result.reward <= 0.0 for result in play(make_row(), [response] * 5))
