"""Rules about the prerequisites of training: for a small evaluation they name the key that limits its rows."""

import pytest
from ill_runs import RISING, of

from mtrl.diagnose.proposals import Proposals
from mtrl.diagnose.rules.baseline import small_evaluation


def found(episodes, **changes):
    run = of(RISING, changes, **{"val/episodes": float(episodes)})
    return Proposals(run.config).settle(small_evaluation(run))


@pytest.mark.parametrize(
    ("episodes", "changes", "words"),
    [
        (40, {"data": {"max_test_rows": 40}}, ("data.max_test_rows=200",)),
        (40, {"data": {"synthetic_test_rows": 40}}, ("data.synthetic_test_rows=200",)),
        (
            40,
            {"data": {"max_test_rows": 40, "synthetic_test_rows": 100}},
            ("data.max_test_rows=200", "data.synthetic_test_rows=200"),
        ),
        (40, {"data": {"max_test_rows": 40, "validation_rows": 40}}, ("data.validation_rows=200",)),
        (
            40,
            {"data": {"max_test_rows": 40}, "evaluation": {"rows": 100}},
            ("data.max_test_rows=200", "evaluation.rows=200"),
        ),
        (30, {"evaluation": {"rows": 30}}, ("evaluation.rows=200",)),
        (
            30,
            {"data": {"max_test_rows": 40}, "evaluation": {"rows": 30}},
            ("data.max_test_rows=200", "evaluation.rows=200"),
        ),
        (
            40,
            {"data": {"path": "owner/name", "max_test_rows": 40, "synthetic_test_rows": 9}},
            ("data.max_test_rows=200",),
        ),
    ],
)
def test_the_key_that_limits_a_small_evaluation_is_proposed(episodes, changes, words):
    finding = found(episodes, **changes)
    assert finding.change.words == words and finding.advice == ""


def test_rows_that_the_sources_of_a_mixture_limit_get_advice():
    own = {"environment": {"name": "gsm8k"}, "data": {"synthetic_test_rows": 20}}
    finding = found(40, data={"synthetic_test_rows": 20}, environments={"a": own, "b": own})
    assert finding.proposals == () and finding.advice.startswith("All 40 held-out rows")


@pytest.mark.parametrize("rows", [100, 200])
def test_a_split_with_few_rows_of_its_own_needs_more_rows(rows):
    finding = found(40, data={"path": "owner/name"}, evaluation={"rows": rows})
    assert finding.proposals == ()
    assert finding.advice == "All 40 held-out rows of the data are in use: add rows to the split of the evaluations."
