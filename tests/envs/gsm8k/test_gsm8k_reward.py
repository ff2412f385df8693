"""Answers and rewards of gsm8k, and their agreement with the scorer, which shares no code."""

import ast
import inspect
import itertools
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.gsm8k import scorer
from envs.gsm8k.environment import Gsm8kEnv
from envs.gsm8k.reward import TurnReward, parse_answer
from mtrl.errors import UserError
from mtrl.types import FinishReason, Trajectory, Turn

READ_AS = [
    ("#### 72", "72"),
    ("so 70 + 2.\n#### 72", "72"),
    ("#### 72\n", "72"),
    ("####72", "72"),
    ("#### 72.", "72"),
    ("#### 72.0", "72"),
    ("#### 072", "72"),
    ("#### $72", "72"),
    ("#### 1,000", "1000"),
    ("#### 1,234,567.50", "1234567.5"),
    ("#### -3", "-3"),
    ("#### -$3", "-3"),
    ("#### $-3", "-3"),
    ("#### .5", "0.5"),
    ("#### Step one\nadd\n#### 72", "72"),
]
NOT_WELL_FORMATTED = [
    "",
    "72",
    "####",
    "#### ",
    "####\n72",
    "### 72",
    "##### 72",
    "######## 72",
    "#### seventy-two",
    "#### 1 or #### 72",
    "#### 72 or #### 1",
    "#### 1, or #### 72",
    "#### 72\n#### 72",
    "#### 72 pens",
    "#### 72%",
    "#### 7 2",
    "#### 72 and so on",
    "#### 10,00",
    "#### 1,0000",
    "#### --3",
    "#### 7.2.1",
    "#### 7e1",
    "#### \u0667\u0662",
    "#### 72*",
    "#### <calc>70+2</calc>",
]


def scored(text, answer):
    message = {"role": "assistant", "content": text}
    turn = Turn([], [], [], [], FinishReason.STOP, text, message)
    return scorer.score(Trajectory("0", "0", 0, [turn]), {"ground_truth": {"answer": answer}})


@pytest.mark.parametrize(("text", "number"), READ_AS)
def test_well_formatted_answers(text, number):
    assert parse_answer(text) == Decimal(number)
    assert scored(text, number) == 1.0
    assert scored(text, "123.25") == 0.0


@pytest.mark.parametrize("text", NOT_WELL_FORMATTED)
def test_malformed_answers_are_never_right(text):
    assert parse_answer(text) is None
    assert scored(text, "72") == scored(text, "1") == 0.0


@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.sampled_from(["####", "#", " ", "7", "72", ",", "000", ".", "-", "$", "\n", "x", "1,000", ":"]), max_size=9
    )
)
def test_reward_and_scorer_agree_on_any_text(pieces):
    text = "".join(pieces)
    answer = parse_answer(text)
    if answer is None:
        assert scored(text, "72") == scored(text, "7") == scored(text, "0") == 0.0
    else:
        assert scored(text, f"{answer:f}") == 1.0  # `str` writes small numbers with an exponent


def test_long_numbers_are_compared_to_the_last_digit():
    assert scored("#### " + "7" * 40, "7" * 40) == 1.0
    assert scored("#### -" + "7" * 39 + "8", "-" + "7" * 40) == 0.0


def test_scorer_imports_nothing_of_the_reward():
    imported = {
        node.module for node in ast.walk(ast.parse(inspect.getsource(scorer))) if isinstance(node, ast.ImportFrom)
    }
    assert imported == {"__future__", "decimal", "mtrl.types"}


def test_a_conversation_without_an_answer_scores_zero():
    assert scorer.score(Trajectory("0", "0", 0), {"ground_truth": {"answer": "72"}}) == 0.0


@pytest.mark.parametrize(
    ("scheme", "answers", "rewards"),
    [
        ("guide", ["72"], [1.0]),
        ("default", ["72"], [1.0]),
        ("guide", ["1", "72"], [0.04, 1.0]),
        ("default", ["1", "72"], [0.0, 1.0]),
        ("guide", ["1", "2", "3", "4", "72"], [0.04, 0.04, 0.04, 0.04, 1.0]),
        ("guide", ["1", None, "3", "4", "72"], [0.04, 0.0, 0.04, 0.04, 1.0]),
        ("default", ["1", None, "3", "4", "72"], [0.0, 0.0, 0.0, 0.0, 1.0]),
        ("guide", [None, None], [0.0, 0.0]),
        ("guide", ["1", "2", "3", "4", "5"], [0.04] * 5),
        ("default", ["1", "2", "3", "4", "5"], [0.0] * 5),
    ],
)
def test_rewards_of_each_turn(scheme, answers, rewards):
    reward = TurnReward(scheme, max_turns=5)
    components = [reward.components(answer and Decimal(answer), Decimal(72)) for answer in answers]
    assert [sum(turn.values()) for turn in components] == pytest.approx(rewards, abs=1e-15)
    assert [turn["format"] for turn in components] == [
        0.0 if scheme == "default" or answer in (None, "72") else pytest.approx(0.2 / 5) for answer in answers
    ]


@given(st.lists(st.sampled_from(["72", "1", "7200", None]), min_size=1, max_size=12), st.integers(0, 28))
def test_by_default_an_episode_earns_one_if_it_is_solved_and_else_nothing(answers, more_turns):
    """The reward is exact in any turn and after any earlier turns; the form alone has no reward."""
    reward = TurnReward("default", len(answers) + more_turns)
    turns = answers[: answers.index("72") + 1] if "72" in answers else answers
    components = [reward.components(answer and Decimal(answer), Decimal(72)) for answer in turns]
    assert [sum(turn.values()) for turn in components] == [float(answer == "72") for answer in turns]
    assert not any(turn["format"] for turn in components)


REPLIES = ("#### 72", "#### 5", "no idea", "<calc>1+1</calc>")
"""A right answer, a wrong one, a malformed one, and a call of the calculator."""


def best_return(scheme, max_turns, gamma=1.0):
    """The maximum reward of all sequences of responses that do not begin with the right answer."""
    best = -1.0
    for replies in itertools.product(REPLIES, repeat=max_turns):
        if replies[0] == REPLIES[0]:
            continue
        environment, total = Gsm8kEnv(max_turns, reward=scheme, calculator=True), 0.0
        environment.reset({"id": "1"})
        for turn, reply in enumerate(replies):
            step = environment.step(reply, {"answer": "72"})
            total += gamma**turn * step.reward
            if step.done:
                break
        best = max(best, total)
    return best


def test_no_strategy_earns_more_than_the_right_answer_at_once():
    for max_turns in range(2, 6):
        assert best_return("default", max_turns) <= 1.0
        assert best_return("default", max_turns, gamma=0.99) < 1.0
    assert best_return("guide", 5) == pytest.approx(1.16)  # the exploit, which the search does find


@pytest.mark.parametrize(("scheme", "most"), [("default", 0.0), ("guide", 0.2)])
def test_the_maximum_reward_without_a_right_answer(scheme, most):
    """The check tries all kinds of moves: `default` rewards no failed episode, and `guide` rewards wrong answers."""
    wrong = [reply for reply in REPLIES if reply != REPLIES[0]]
    returns = set()
    for replies in itertools.product(wrong, repeat=4):
        environment = Gsm8kEnv(4, reward=scheme, calculator=True)
        environment.reset({"id": "1"})
        returns.add(round(sum(environment.step(reply, {"answer": "72"}).reward for reply in replies), 9))
    assert max(returns) == most and min(returns) == 0.0


def test_the_guides_scheme_rewards_wrong_answers_before_the_right_one():
    """The scheme is not the default for this reason."""
    reward = TurnReward("guide", max_turns=5)
    components = [sum(reward.components(Decimal(n), Decimal(72)).values()) for n in (1, 2, 3, 4, 72)]
    assert sum(components) == pytest.approx(1.16)


def test_an_unknown_scheme_names_the_known_ones():
    with pytest.raises(UserError, match=r"reward\.scheme=dense .*default, guide"):
        TurnReward("dense", 5)
