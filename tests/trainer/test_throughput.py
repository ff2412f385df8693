"""Throughput metrics of a step."""

import itertools

import pytest
from helpers import make_group

from mtrl.trainer.data.batching import PACKED, PADDED, micro_batches
from mtrl.trainer.data.samples import group_samples
from mtrl.trainer.flops import ModelFlops
from mtrl.trainer.throughput import Computation, Throughput, forwarded, trained, turn_metrics

MODEL = ModelFlops(body=100, body_trained=100, head=10, head_trained=10, width=3, windows=(None,))


def batches(layout, max_tokens=64):
    groups = [make_group(seed, 30) for seed in range(3)]
    samples = [s for g in groups for s in group_samples(g, [[1.0] * len(t.turns) for t in g.trajectories])]
    weights = [[1.0] * len(sample.token_ids) for sample in samples]
    return samples, micro_batches(samples, weights, max_tokens, layout=layout)


@pytest.mark.parametrize("layout", [PADDED, PACKED])
def test_work_does_not_depend_on_the_layout(layout):
    samples, found = batches(layout)
    work = sum((trained(MODEL, batch) for batch in found), Computation())
    lengths = [len(sample.token_ids) for sample in samples]
    assert work.tokens == sum(lengths)
    assert work.cells == sum(batch.token_ids.numel() for batch in found)
    assert (work.cells == work.tokens) == (layout is PACKED)
    assert work.flops == pytest.approx(MODEL.training(lengths, sum(s.action_tokens for s in samples)))
    ahead = sum((forwarded(MODEL, batch) for batch in found), Computation())
    assert (ahead.tokens, ahead.cells) == (0, 0) and ahead.flops == pytest.approx(work.flops / 3)


def test_a_filler_counts_only_as_padding():
    batch = batches(PADDED)[1][0]
    assert trained(MODEL, batch.filler()) == Computation(cells=batch.token_ids.numel())
    assert forwarded(MODEL, batch.filler()) == Computation()


def timed_group():
    group = make_group(0, 30, size=2, turns=2)
    turns = [turn for trajectory in group.trajectories for turn in trajectory.turns]
    for number, turn in enumerate(turns, 1):
        turn.seconds_generate, turn.seconds_environment = float(number), 0.5
    return group, turns


def test_metrics_of_alternating_rollouts_and_updates():
    group, turns = timed_group()
    seconds = {"generate": 4.0, "credit": 0.5, "update": 5.0, "sync": 0.5}
    works = [Computation(300, 400, 2e9), Computation(200, 400, 1e9)]
    found = Throughput(peak=1e9).metrics(seconds, [group], works)
    sampled = sum(len(turn.action_ids) for turn in turns)
    assert {name: found[f"time/{name}"] for name in seconds} == seconds and found["time/step"] == 10.0
    assert found["perf/idle_frac"] == pytest.approx(0.4)
    assert found["perf/rollout_idle_frac"] == pytest.approx(0.6)
    assert found["perf/rollout_tokens_per_second"] == pytest.approx(sampled / 4)
    assert found["perf/update_tokens_per_second"] == pytest.approx(500 / 5)
    assert found["perf/packing_efficiency"] == pytest.approx(500 / 800)
    assert found["perf/mfu"] == pytest.approx(3e9 / (5 * 2 * 1e9))  # two ranks
    assert found["perf/rank_balance"] == pytest.approx(1.5 / 2)


def test_metrics_of_overlapping_rollouts_and_updates():
    """The trainer waits for a tenth of the step, and turns are sampled for nine tenths of it."""
    group, turns = timed_group()
    seconds = {"wait": 1.0, "credit": 0.5, "update": 8.0, "sync": 0.5}
    found = Throughput().metrics(seconds, [group], [Computation(300, 400, 2e9)], sampling_seconds=9.0)
    assert found["perf/idle_frac"] == pytest.approx(0.1)
    assert found["perf/rollout_idle_frac"] == pytest.approx(0.1)
    assert found["perf/rollout_tokens_per_second"] == pytest.approx(sum(len(t.action_ids) for t in turns) / 9)
    assert "perf/mfu" not in found and "perf/rank_balance" not in found  # no peak, one rank


def test_times_of_turns_are_averaged_and_summed():
    group, turns = timed_group()
    count = len(turns)
    assert turn_metrics([group]) == pytest.approx(
        {
            "time/generate_per_turn": (count + 1) / 2,
            "time/generate_all_turns": count * (count + 1) / 2,
            "time/environment_per_turn": 0.5,
            "time/environment_all_turns": count / 2,
        }
    )


@pytest.mark.parametrize(
    ("groups", "works", "seconds"),
    list(
        itertools.product(
            [[], [timed_group()[0]]], [[], [Computation()], [Computation()] * 2], [{}, {"wait": 0.0, "update": 0.0}]
        )
    ),
)
def test_metrics_that_do_not_apply_are_absent(groups, works, seconds):
    found = Throughput(peak=1e9).metrics(seconds, groups, works, sampling_seconds=0.0)
    assert not [key for key in found if key.startswith("perf/")]
    assert found["time/step"] == 0.0


def test_shares_are_between_0_and_1():
    """Turns may also have been sampled before the step began, as between two steps."""
    found = Throughput().metrics({"wait": 1.0}, [timed_group()[0]], [], sampling_seconds=3.0)
    assert found["perf/rollout_idle_frac"] == 0.0 and found["perf/idle_frac"] == 1.0
