"""`experiments/scaling`: in simulated time no group is lost or too old, and all work takes time."""

import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import ROOT

sys.path.insert(0, str(ROOT / "experiments" / "scaling"))

from clock import Clock
from costs import LEADER, Costs
from drawing import draw, saturated, tables
from hardware import Hardware
from interpreter import DESK, LOOP, Interpreter
from job import Job, Plan
from scaling import ARMS, Row, Task, read_csv, write_csv
from server import Asked, Server, Speed
from workload import WORKLOADS, Tail

SCALING = ROOT / "experiments" / "scaling"
COSTS = Costs.read(SCALING / "costs.yaml")
IDEAL = COSTS.without([*LEADER, "network"])
SMALL = replace(WORKLOADS["tools"], per_gpu=4, turns=Tail(3, 0.5, 8), group_size=2)
ONE_TURN = replace(WORKLOADS["math"], per_gpu=4, sampled=Tail(400, 0.9), group_size=2)


def run(plan, steps, costs=COSTS, seed=0):
    job = Job(plan, Hardware(costs), seed)
    job.run(steps)
    return job


# -- conservation -----------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    lag=st.integers(0, 4), on_stale=st.sampled_from(["wait", "requeue"]), gpus=st.sampled_from([2, 4, 8]),
    tail=st.sampled_from([0.0, 1.0, 3.0]), colocated=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_no_group_is_lost_repeated_or_too_old(lag, on_stale, gpus, tail, colocated, seed):
    plan = Plan(SMALL.with_tails(tail), gpus, lag, colocated=colocated and not lag, on_stale=on_stale)
    job = run(plan, 4, seed=seed)
    admission = job.admission
    trained = [number for step in job.steps for number in step.trained]
    left = [slot.number for slot in [*admission.outstanding, *admission.training, *admission.again]]
    assert sorted([*trained, *left]) == list(range(admission.admitted))
    assert all(len(step.trained) == job.batch for step in job.steps)
    assert all(0 <= age <= lag for step in job.steps for age in step.ages)
    assert admission.outstanding == {*job.running, *job.finished}
    assert not job.requeued or on_stale == "requeue"
    assert all(before.ended == after.begun < after.ended for before, after in pairwise(job.steps))


def test_all_trained_tokens_were_sampled():
    job = run(Plan(SMALL, 4, 1), 3)
    step = job.steps[-1]
    episodes = [SMALL.episode(0, number, index) for number in step.trained for index in range(SMALL.group_size)]
    assert step.sampled == sum(turn.sampled for episode in episodes for turn in episode)
    assert step.context == sum(turn.sampled + turn.observed for episode in episodes for turn in episode)


def test_a_seed_determines_everything():
    plan = Plan(SMALL, 4, 1)
    assert run(plan, 4).steps == run(plan, 4).steps != run(plan, 4, seed=1).steps


# -- limits -----------------------------------------------------------------------------------------------------------


def test_without_tails_and_with_nothing_but_gpus_a_step_is_sampling_and_learning():
    plan = Plan(ONE_TURN.without_tail(), 2, lag=0)
    job = run(plan, 3, IDEAL)
    speed, count = job.hardware.speed(plan), job.batch * ONE_TURN.group_size
    tokens = 400 * speed.iteration(count, count * (200 + 400 / 2)) + count * 200 * speed.per_prompt_token
    for step in job.steps:
        assert step.waited == pytest.approx(tokens)
        assert step.seconds == pytest.approx(tokens + step.updated)
        assert not step.paused


def test_an_update_that_takes_longest_hides_all_else():
    costs = IDEAL.changed(mfu=1e-4)
    steps = run(Plan(ONE_TURN, 2, lag=1), 5, costs).steps[2:]
    assert all(step.seconds == pytest.approx(step.updated) and not step.waited for step in steps)


@pytest.mark.parametrize("seed", range(3))
def test_the_longer_the_tail_the_longer_the_step(seed):
    steps = [run(Plan(ONE_TURN.with_tails(f), 4, 0), 2, IDEAL, seed).steps for f in (0.0, 0.5, 1.0, 1.5)]
    waited = [sum(step.waited for step in of) for of in steps]
    assert waited == sorted(waited) and waited[-1] > 1.5 * waited[0]


def test_rank_0_only_makes_it_slower_and_overlap_faster():
    def seconds(lag, costs):
        job = run(Plan(SMALL, 8, lag), lag + 5, costs)
        return (job.steps[-1].ended - job.steps[lag].ended) / 4

    found = {lag: (seconds(lag, COSTS), seconds(lag, COSTS.without(LEADER))) for lag in (0, 1)}
    assert all(real > free for real, free in found.values())
    assert found[1][0] < found[0][0]


def test_some_servers_represent_all():
    whole, part = (run(replace(Plan(SMALL, 32, 1), most=most), 8) for most in (32, 8))
    seconds = [sum(step.seconds for step in job.steps[2:]) for job in (whole, part)]
    assert seconds[1] == pytest.approx(seconds[0], rel=0.2)
    for kind in ("turns", "credit", "hand-out", "weights, calls", "telling"):
        assert part.leader.spent[kind] == pytest.approx(whole.leader.spent[kind], rel=0.15), kind


# -- parts ------------------------------------------------------------------------------------------------------------

SPEED = Speed(fixed=1.0, per_cached_token=0.0, per_turn=0.0, per_prompt_token=0.1, slots=2, room=1e9)


def asked(clock, done, name, prefill=0, sampled=10):
    return Asked(prefill, prefill, sampled, lambda: done.append((name, clock.now)))


def test_turns_of_a_server_are_sampled_together_a_prefill_interrupts_them_and_the_third_waits():
    clock, done = Clock(), []
    server = Server(clock, SPEED)
    server.ask(asked(clock, done, "a"))
    clock.after(4.0, lambda: server.ask(asked(clock, done, "b", prefill=20)))
    clock.after(4.5, lambda: server.ask(asked(clock, done, "c")))
    clock.run(lambda: len(done) == 3)
    assert done == [("a", pytest.approx(12.0)), ("b", pytest.approx(16.0)), ("c", pytest.approx(22.0))]
    assert server.load == 0 and server.busy == pytest.approx(22.0)


def test_a_pause_delays_all_turns_and_what_they_have_cached_is_computed_anew():
    clock, done = Clock(), []
    server = Server(clock, SPEED)
    server.ask(asked(clock, done, "a", prefill=10))
    clock.after(3.0, server.pause)
    clock.after(8.0, server.resume)
    clock.run(lambda: done)
    cached = 10 + 10 / 2
    assert done == [("a", pytest.approx(1.0 + 10 + 5.0 + 0.1 * cached))]


def test_a_dropped_turn_frees_its_slot():
    clock, done = Clock(), []
    server = Server(clock, SPEED)
    turns = [asked(clock, done, name) for name in "abcd"]
    for turn in turns:
        server.ask(turn)
    clock.after(2.0, lambda: [server.drop(turns[0]), server.drop(turns[3])])
    clock.run(lambda: len(done) == 2)
    assert done == [("b", pytest.approx(10.0)), ("c", pytest.approx(12.0))]


def test_the_interpreter_is_shared_while_both_lanes_have_work():
    clock, done = Clock(), []
    leader = Interpreter(clock)
    for lane, kind, seconds in ((LOOP, "turns", 1.0), (LOOP, "turns", 1.0), (DESK, "credit", 3.0)):
        leader.do(lane, kind, seconds, lambda kind=kind: done.append((kind, clock.now)))
    clock.run(lambda: len(done) == 3)
    assert done == [("turns", 2.0), ("turns", 4.0), ("credit", 5.0)]
    assert leader.spent == Counter(turns=2.0, credit=3.0)


def test_time_never_decreases_and_a_stuck_job_is_an_error():
    clock = Clock()
    with pytest.raises(ValueError, match="-1"):
        clock.after(-1, lambda: None)
    with pytest.raises(RuntimeError, match="nothing happens any more"):
        clock.run(lambda: False)


def test_the_tail_has_its_mean_and_the_model_its_size():
    import numpy as np

    drawn = Tail(300, 0.8).draw(np.random.default_rng(0), 200_000)
    assert drawn.mean() == pytest.approx(300, rel=0.02)
    assert Tail(300, 0.8, 500).draw(np.random.default_rng(0), 1000).max() == 500
    assert WORKLOADS["tools"].flops.body == pytest.approx(WORKLOADS["tools"].architecture.parameters, rel=0.2)


# -- costs and results ------------------------------------------------------------------------------------------------


def test_every_cost_names_its_source(tmp_path):
    assert {cost.part for cost in COSTS.table.values()} >= set(LEADER)
    assert {cost.source for cost in COSTS.table.values()} == {"measured", "cited", "assumed"}
    odd = tmp_path / "costs.yaml"
    odd.write_text("costs: {turn: {value: 1, unit: s, part: turns, source: heard, note: x}}")
    with pytest.raises(ValueError, match="turn needs"):
        Costs.read(odd)


def test_results_are_stored_tabulated_and_plotted(tmp_path):
    tasks = [Task("math", arm, 2, 0.5, 1) for arm in ARMS] + [Task("math", "K = 1", 2, 0.5, 1, LEADER)]
    rows = [task.run() for task in tasks]
    write_csv(rows, tmp_path / "results.csv")
    again = read_csv(tmp_path / "results.csv")
    assert [row.arm for row in again] == [*ARMS, "K = 1"]
    assert [row.step for row in again] == pytest.approx([row.step for row in rows], rel=1e-3)
    assert "| math | K = 4 |" in tables(again)
    draw(again, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").stat().st_size > 1000


def test_rank_0_is_saturated_where_it_costs_a_fifth_of_a_step():
    zero = {"share": 0.5, "waiting": 0.0, "update": 0.0, "paused": 0.0, "tokens_per_gpu": 0.0, "age": 0.0}
    rows = [
        Row("math", "K = 1", gpus, free, step=step, oldest=0, requeued=0, **zero)
        for gpus, real, ideal in ((8, 11.5, 10.0), (16, 12.5, 10.0))
        for free, step in (("", real), (" ".join(LEADER), ideal))
    ]
    assert saturated(rows, "math").gpus == 16 and saturated(rows[:2], "math") is None


def test_the_stored_results_are_complete():
    rows = read_csv(SCALING / "results.csv")
    assert {row.workload for row in rows} == set(WORKLOADS) and {row.arm for row in rows} == set(ARMS)
    assert all(row.oldest <= ARMS[row.arm]["lag"] and 0 < row.interpreter <= 1.001 for row in rows if not row.free)
    assert tables(rows) == (SCALING / "results.md").read_text()
