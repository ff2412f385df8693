"""The sampler of a mixture: shares by worked numbers and by their proven bounds, and exact resume."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl.config.mixture import source_of
from mtrl.config.schema import Config, DataConfig, EnvironmentConfig
from mtrl.environments.mixture import interleaved
from mtrl.errors import UserError
from mtrl.trainer.data.mixed_sampler import sampler_of

NAMES = "abcd"


def config(weights, **data):
    sources = {name: {"weight": weight, "data": {"path": "rows"}} for name, weight in weights.items()}
    return Config(environment=EnvironmentConfig("vault"), environments=sources, data=DataConfig(**data))


def rows(counts):
    return interleaved([[{"id": f"{name}/{n}"} for n in range(count)] for name, count in counts.items()])


def made(weights, counts=None, **data):
    return sampler_of(config(weights, **data), rows(counts or dict.fromkeys(weights, 5)))


def drawn(sampler, count):
    return [sampler.next()["id"] for _ in range(count)]


def test_two_to_one_by_worked_numbers_and_each_source_in_its_own_passes():
    sampler = made({"a": 2, "b": 1}, {"a": 4, "b": 2})
    ids = drawn(sampler, 12)
    assert "".join(map(source_of, ids)) == "abaabaabaaba"
    assert sorted(ids[:6]) == ["a/0", "a/1", "a/2", "a/3", "b/0", "b/1"]
    assert sampler.metrics() == {"data/a/epoch": 2.0, "data/b/epoch": 2.0} and sampler.drawn == 12


@settings(max_examples=40)
@given(st.lists(st.floats(0, 9), min_size=1, max_size=4).filter(any), st.integers(1, 80))
def test_no_source_is_more_than_a_row_ahead_of_its_share(weights, count):
    weights = dict(zip(NAMES, weights, strict=False))
    found = Counter(map(source_of, drawn(made(weights), count)))
    for name, weight in weights.items():
        exact = count * weight / sum(weights.values())
        assert exact - (len(weights) - 1) - 1e-6 <= found[name] <= exact + 1 + 1e-6
        assert weight or not found[name]


@settings(max_examples=20)
@given(st.integers(0, 30), st.sampled_from(["uniform", "difficulty"]))
def test_a_restored_sampler_goes_on_exactly_and_other_weights_begin_new_counts(count, kind):
    weights = {"a": 3, "b": 1, "c": 1}

    def play(sampler, count):
        found = []
        for n in range(count):
            row = sampler.next()
            sampler.note(row, n % 3 / 2)
            found.append(row["id"])
        return found

    first = made(weights, sampler=kind)
    play(first, count)
    state = json.loads(json.dumps(first.state()))
    again, changed = made(weights, sampler=kind), made({"a": 0, "b": 1, "c": 1}, sampler=kind)
    for sampler in (again, changed):
        sampler.drawn = count
        sampler.restore(state)
    assert sum(changed.counts.values()) == 0
    assert Counter(map(source_of, drawn(changed, 10))) == {"b": 5, "c": 5}
    assert play(again, 40) == play(first, 40)


def test_a_source_with_a_weight_needs_training_rows():
    with pytest.raises(UserError, match=r"environments\.b has no training rows and weight=1; check its data\.path"):
        made({"a": 1, "b": 1}, {"a": 2})
    assert {source_of(id) for id in drawn(made({"a": 1, "b": 0}, {"a": 2}), 4)} == {"a"}
