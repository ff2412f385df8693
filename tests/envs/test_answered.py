"""`Family.answered` of every shipped task: right and wrong answers count, an unreadable reply does not."""

import pytest

from mtrl.config.schema import DataConfig
from mtrl.environments.family import BUILT_IN, get_family
from mtrl.types import StopReason
from tests.envs.episodes import trajectory_of

WRONG = {
    "gsm8k": "#### 123456",
    "text_to_sql": "<solution>SELECT 123456</solution>",
    "search": "<answer>none of them</answer>",
    "triviaqa": "<answer>none of them</answer>",
    "sop": '<final_output>{"decision": "none of them"}</final_output>',
}
"""A wrong answer in the required form; in the other tasks the whole episode is the answer."""


@pytest.fixture(scope="module", params=sorted(BUILT_IN))
def solved(request):
    """A family, one of its rows, and the gold responses."""
    family = get_family(request.param)
    row = family.load(DataConfig(synthetic_train_rows=2, synthetic_test_rows=2), 0).train[0]
    return family, row, list(family.gold(row))


def test_a_right_answer(solved):
    family, row, gold = solved
    assert family.answered(trajectory_of(gold), row) is True


def test_a_wrong_answer_that_can_be_read(solved):
    family, row, gold = solved
    if family.name in WRONG:
        assert family.answered(trajectory_of([*gold[:-1], WRONG[family.name]]), row) is True


def test_no_answer(solved):
    """The environment ends these episodes, and an episode without further turns ends before its answer."""
    family, row, gold = solved
    assert family.answered(trajectory_of(["I do not know."]), row) is False
    assert family.answered(trajectory_of([*gold, "I do not know."]), row) is False
    assert family.answered(trajectory_of(gold[:-1], stop_reason=StopReason.MAX_TURNS), row) is False
    assert family.answered(trajectory_of([]), row) is False
