"""The sampler of a mixture: shares by worked numbers and by their proven bounds, and exact resume."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl.config.mixture import source_of
from mtrl.config.schema import Config, DataConfig, EnvironmentConfig
from mtrl.config.source_weights import shares_of
from mtrl.environments.mixture import interleaved
from mtrl.errors import RunEndedError, UserError
from mtrl.trainer.data.mixed_sampler import sampler_of
from mtrl.types import Group, StopReason, Trajectory

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
    epochs = {"data/a/epoch": 2.0, "data/b/epoch": 2.0, "data/a/share": 2 / 3, "data/b/share": 1 / 3}
    assert sampler.metrics() == {**epochs, "data/a/paused": 0.0, "data/b/paused": 0.0} and sampler.drawn == 12


def test_equal_weights_alternate_for_ever():
    assert "".join(map(source_of, drawn(made({"a": 1, "b": 1, "c": 1}), 300))) == 100 * "abc"


def test_a_schedule_by_worked_numbers():
    """The share of `a` falls from 1 to 0 over 4 rows: 1, 0.75, 0.5, 0.25, 0."""
    sampler = made({"a": [[0, 4], [4, 0]], "b": [[0, 0], [4, 4]]})
    assert "".join(map(source_of, drawn(sampler, 8))) == "aababbbb"
    assert sampler.metrics()["data/a/share"] == 0.0


@settings(max_examples=12)
@given(
    st.lists(st.lists(st.floats(0, 9), min_size=2, max_size=2), min_size=2, max_size=4),
    st.lists(st.integers(0, 60), min_size=2, max_size=2, unique=True).map(sorted),
    st.integers(1, 80),
)
def test_no_source_is_more_than_a_row_ahead_of_its_scheduled_share(ends, at, count):
    schedules = {
        name: [[at[0], ends[0] + (not number)], [at[1], ends[1] + (not number)]]
        for number, (name, ends) in enumerate(zip(NAMES, ends, strict=False))
    }
    sampler = made(schedules)
    exact = dict.fromkeys(schedules, 0.0)
    for row in range(count):
        for name, share in shares_of(sampler.weights, row).items():
            exact[name] += share
    found = Counter(map(source_of, drawn(sampler, count)))
    for name in schedules:
        assert exact[name] - (len(schedules) - 1) - 1e-6 <= found[name] <= exact[name] + 1 + 1e-6


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
def test_a_restored_sampler_goes_on_exactly_and_other_weights_owe_nothing(count, kind):
    weights = {"a": [[0, 3], [50, 1]], "b": 1, "c": 1}

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
    assert set(changed.owed.values()) == {0.0}
    assert Counter(map(source_of, drawn(changed, 10))) == {"b": 5, "c": 5}
    assert play(again, 40) == play(first, 40)


def played(row, fails):
    """Return a group of two episodes on the row, which fail or not."""
    reason, error = (StopReason.ENV_ERROR, "OSError: no service") if fails else (StopReason.DONE, None)
    return Group("g", row, [Trajectory(row["id"], "g", n, [], reason, error=error) for n in range(2)])


def play(sampler, steps, broken):
    """Return the names of the sources that each step draws: 8 groups, and a replacement for each that fails.
    `broken(name, step)` tells whether the episodes of a source fail."""
    found = []
    for step in steps:
        sampler.pauses.begin_step(step)
        names, wanted = [], 8
        while wanted:
            row = sampler.next()
            names.append(name := source_of(row["id"]))
            sampler.pauses.note(played(row, broken(name, step)))
            wanted -= not broken(name, step)
        found.append(names)
    return found


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.integers(0, 12), st.integers(0, 30), st.integers(0, 50))
def test_a_source_that_fails_alone_is_left_out_and_a_restored_run_goes_on_exactly(weights, first, length, cut):
    weights = dict(zip(NAMES, weights, strict=False))

    def broken(name, step):
        return name == "a" and first <= step < first + length

    sampler, again = made(weights), made(weights)
    whole = play(sampler, range(cut), broken)
    again.drawn = sampler.drawn
    again.restore(json.loads(json.dumps(sampler.state(), sort_keys=True)))
    rest = play(sampler, range(cut, 60), broken)
    assert play(again, range(cut, 60), broken) == rest
    whole += rest

    assert whole[:first] == play(made(weights), range(first), lambda name, step: False)
    failures = [step for step, names in enumerate(whole) for name in names if broken(name, step)]
    window = max(4, round(16 * weights["a"] / sum(weights.values())))  # of the default of 16 groups per step
    assert len(failures) <= window + 4  # one group is tried after each of the pauses of 2, 4, 8 and 16 steps
    if first + length < 29:
        assert "a" in sampler.pauses.active  # the fourth pause is over
    for names in whole:
        if "a" not in names:
            others = sum(weights.values()) - weights["a"]
            for name in weights.keys() - {"a"}:
                assert abs(names.count(name) - len(names) * weights[name] / others) <= 2 * (len(weights) - 1)


def test_the_last_source_ends_the_run_with_the_sentence_of_a_single_task(caplog):
    sampler = made({"a": 1, "b": 1})
    what = (
        r"16 of 16 episodes failed, more than environment\.max_failed_share=0\.5 allows; the last failure was: OSError"
    )
    with pytest.raises(RunEndedError, match=what):
        play(sampler, range(1), lambda name, step: True)
    (warning,) = caplog.messages
    assert warning.startswith(
        "environments.a is paused: 16 of 16 episodes failed, more than environment.max_failed_share"
    )
    assert "The rows of b replace its rows, and step 4 tries it again" in warning
    assert sampler.metrics()["data/a/paused"] == 1.0 and sampler.metrics()["data/b/paused"] == 0.0


def test_a_source_with_a_weight_needs_training_rows():
    with pytest.raises(
        UserError, match=r"environments\.b has no training rows and a weight above 0; check its data\.path"
    ):
        made({"a": 1, "b": 1}, {"a": 2})
    assert {source_of(id) for id in drawn(made({"a": 1, "b": 0}, {"a": 2}), 4)} == {"a"}
