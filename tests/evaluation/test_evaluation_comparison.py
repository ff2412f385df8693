"""Two models on the same rows."""

import pytest

from mtrl.config.schema import EvaluationConfig
from mtrl.evaluation.comparison import comparisons
from mtrl.scoring.statistics import mcnemar, mean_difference
from mtrl.types import StopReason
from tests.evaluation.made import groups_of, scored

CONFIG = EvaluationConfig(pass_k_values=[1, 2])


def compared(mine, theirs, kind="greedy", config=CONFIG):
    found = comparisons("new", groups_of(mine, kind), [("old", groups_of(theirs, kind))], kind, config)
    return found[0] if found else None


def test_greedy():
    c = compared(scored([1, 1, 1, 0, 0]), scored([1, 0, 0, 1, 0]))
    assert (c.value, c.other_value, c.rows, c.left_out) == (0.6, 0.4, 5, 0)
    assert (c.paired.wins, c.paired.losses, c.paired.ties) == (2, 1, 2)
    assert c.difference == mean_difference([0.0, 1.0, 1.0, -1.0, 0.0])
    assert c.paired.p_value == mcnemar(2, 1) and c.test == "exact McNemar test"
    assert [change.row for change in c.fixed] == ["row1", "row2"]
    assert [(change.row, change.before, change.after) for change in c.broken] == [("row3", 1.0, 0.0)]


def test_sampled_rows_are_compared_by_their_rates():
    c = compared(scored([[1, 1], [1, 0], [0, 0]]), scored([[0, 1], [0, 0], [0, 1]]), "sampled")
    assert c.difference == mean_difference([0.5, 0.5, -0.5]) and c.test == "sign test of the rows' rates"
    assert (c.paired.wins, c.paired.losses) == (2, 1)
    by_k = {each.k: each for each in c.pass_at_k}
    assert by_k[1].difference.value == pytest.approx(0.5 / 3)
    assert by_k[2].difference == mean_difference([0.0, 1.0, -1.0])


def test_rows_are_paired_by_id_not_by_place():
    mine, theirs = groups_of(scored([1, 0])), groups_of(scored([0, 1]))
    theirs.reverse()
    c = comparisons("new", mine, [("old", theirs)], "greedy", CONFIG)[0]
    assert (c.paired.wins, c.paired.losses) == (1, 1)
    assert [change.row for change in c.fixed] == ["row0"]


def test_rows_that_come_twice_are_paired_in_order():
    mine, theirs = groups_of(scored([1, 0])), groups_of(scored([1, 0]))
    for group in mine + theirs:
        group.row["id"] = "same"
    c = comparisons("new", mine, [("old", theirs)], "greedy", CONFIG)[0]
    assert (c.rows, c.paired.ties) == (2, 2)


def test_failed_episodes_leave_their_row_out():
    mine, theirs = scored([1, 1, 0]), scored([0, 0, 0])
    theirs[0].stop_reason, theirs[0].score = StopReason.TIMEOUT, None
    c = compared(mine, theirs)
    assert (c.rows, c.left_out, c.value) == (2, 1, 0.5)
    assert [change.row for change in c.fixed] == ["row1"]


def test_nothing_in_common():
    theirs = scored([0])
    theirs[0].stop_reason = StopReason.ENV_ERROR
    assert compared(scored([1]), theirs) is None
    assert compared(scored([1]), []) is None


def test_several_models_are_adjusted_for():
    mine = groups_of(scored([1] * 8))
    others = [("a", groups_of(scored([0] * 6 + [1] * 2))), ("b", groups_of(scored([0] * 5 + [1] * 3)))]
    a, b = comparisons("new", mine, others, "greedy", CONFIG)
    assert (a.paired.p_value, b.paired.p_value) == (mcnemar(0, 6), mcnemar(0, 5))
    assert (a.p_adjusted, b.p_adjusted) == (2 * mcnemar(0, 6), 2 * mcnemar(0, 6))
    assert comparisons("new", mine, others[1:], "greedy", CONFIG)[0].p_adjusted == mcnemar(0, 5)
