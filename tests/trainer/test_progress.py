"""Digests of the rows of a run, and the warnings of a resumed run whose rows are others."""

from mtrl.datasets import Splits
from mtrl.trainer.progress import changed_rows, digests


def row(number, **more):
    prompt = [{"role": "user", "content": f"{number} + 1?"}]
    return {"id": f"r{number}", "prompt": prompt, "ground_truth": {"answer": number + 1}, **more}


def test_other_rows_are_named_by_their_split():
    begun = digests(Splits([row(1), row(2)], [row(3)]))
    assert changed_rows(begun, digests(Splits([row(1), row(2, episodes=4)], [row(3)]))) == []
    assert changed_rows({}, begun) == []  # a checkpoint of an earlier version
    for train, test, names in (
        ([row(2), row(1)], [row(3)], ["training"]),
        ([row(1), row(2)], [row(3, ground_truth={"answer": 5})], ["held-out"]),
        ([row(1)], [row(4)], ["training", "held-out"]),
    ):
        found = changed_rows(begun, digests(Splits(train, test)))
        assert [warning.split()[1] for warning in found] == names and all(": " in warning for warning in found)


def test_validation_rows_are_those_that_a_run_evaluates():
    assert digests(Splits([row(1)], [row(2)], [row(3)])) == digests(Splits([row(1)], [row(4)], [row(3)]))
