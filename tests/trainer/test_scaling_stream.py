"""`experiments/scaling` follows the rules of the real stream: `Stream` with the simulated durations trains the same
batches. Its measurements are those of a run."""

import asyncio
import json
import selectors
import sys
from concurrent.futures import Executor, Future
from dataclasses import replace
from threading import Thread

import numpy as np
import pytest
from runs import ROOT
from streams import FakeRollouts, make, publish

from mtrl.engines.vllm.vllm_api import read_turn

sys.path.insert(0, str(ROOT / "experiments" / "scaling"))

from answering import answer_to, turn_of
from costs import Costs
from handout import SHARES, Silent, measure
from hardware import CELL, SAMPLED, Hardware
from job import Job, Plan
from measure import fit, measure_bytes, measure_choosing, route
from workload import WORKLOADS, Tail

from mtrl.distributed.rank_group import RankGroup
from mtrl.distributed.world import World

SCALING = ROOT / "experiments" / "scaling"
WORK = replace(WORKLOADS["tools"], per_gpu=4, turns=Tail(3, 0.7, 8), group_size=2)


class SimulatedTime(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next event."""

    def __init__(self):
        selector = selectors.SelectSelector()
        super().__init__(selector)
        self.now, look = 0.0, selector.select

        def select(timeout=None):
            if timeout:
                self.now += timeout
            return look(0 if timeout is not None else None)

        selector.select = select

    def time(self):
        return self.now


class AtOnce(Executor):
    """Executor that returns after the call, since simulated time does not wait for a thread. The call runs in a thread,
    because it may start an event loop."""

    def submit(self, work, *args, **settings):
        future = Future()
        thread = Thread(target=lambda: future.set_result(work(*args, **settings)))
        thread.start()
        thread.join()
        return future

    def shutdown(self, *args, **settings):
        pass


class Timed(Job):
    """Simulation that records the duration of each group."""

    def __init__(self, *args):
        super().__init__(*args)
        self.begun, self.seconds = {}, {}

        class Finished(dict):
            def __setitem__(finished, slot, group):
                self.seconds[slot.group_id] = self.clock.now - self.begun[slot.group_id]
                super().__setitem__(slot, group)

        self.finished = Finished()

    def _start(self, slot):
        self.begun[slot.group_id] = self.clock.now
        super()._start(slot)


class ReplayedRollouts(FakeRollouts):
    """Rollouts whose groups take as long as in the job; a group that the job had not finished is never finished."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    async def play(self, group_id, row):
        await asyncio.sleep(self.seconds.get(group_id, 1e9))


async def replay(job, lag, on_stale):
    """Return the batches of the real stream with the same durations."""
    stream = make(rollouts=ReplayedRollouts(job.seconds), batch=job.batch, lag=lag, on_stale=on_stale)
    stream.scoring_thread = AtOnce()
    loop, found = asyncio.get_running_loop(), []
    for number, step in enumerate(job.steps):
        experience = await stream.collect(number)
        found.append((loop.time(), [group.group_id for group in experience.groups]))
        await asyncio.sleep(step.published - loop.time())
        publish(stream, number + 1)
        await asyncio.sleep(step.ended - loop.time())
    await stream.close()
    return found


@pytest.mark.parametrize("on_stale", ["wait", "requeue"])
@pytest.mark.parametrize(("lag", "has_workers"), [(0, False), (1, False), (2, True), (4, True)])
def test_the_real_stream_trains_the_same_batches_at_the_same_times(lag, has_workers, on_stale):
    trained = []

    class Recorded(Timed):
        def _ended(self, groups, *rest):
            trained.append([group.slot.group_id for group in groups])
            super()._ended(groups, *rest)

    costs = Costs.read(SCALING / "costs.yaml").changed(choose_per_group=0.0)  # the replayed stream chooses at once
    job = Recorded(Plan(WORK, 8, lag, on_stale=on_stale, has_workers=has_workers), Hardware(costs), 5)
    job.run(8)
    loop = SimulatedTime()
    try:
        found = loop.run_until_complete(replay(job, lag, on_stale))
    finally:
        loop.close()
    assert [ids for _, ids in found] == trained[: len(found)]
    for (moment, _), step in zip(found, job.steps, strict=True):
        assert moment == pytest.approx(step.begun + step.waited, abs=1e-6)
    assert (job.requeued > 0) == (on_stale == "requeue" and lag > 0)


def test_rollout_workers_take_the_turns_from_rank_0():
    """The job simulates 32 of 256 GPUs. 4 of 32 workers run the turns, or rank 0 runs them at eight times the cost."""
    costs = Costs.read(SCALING / "costs.yaml").changed(router_per_replica=0.0)
    alone, shared = (Job(Plan(WORK, 256, 0, has_workers=workers), Hardware(costs), 5) for workers in (False, True))
    for job in (alone, shared):
        job.run(1)
    assert alone.workers == [] and alone.leader.spent["answers"] == 0 == shared.leader.spent["turns"]
    assert shared.plan.workers == 32 and len(shared.workers) == 4 and shared.leader.spent["answers"] > 0
    own = [worker.spent["turns"] for worker in shared.workers]
    assert 8 * sum(own) == pytest.approx(alone.leader.spent["turns"]) and min(own) > 0.5 * max(own)


# -- measurements -----------------------------------------------------------------------------------------------------


def test_the_simulated_server_answers_as_a_server_does():
    body = b'{"sampling_params": {"max_tokens": 5}}'
    assert answer_to("/inference/v1/generate", body) == turn_of(5)
    generation = read_turn(json.loads(turn_of(5)))
    assert len(generation.token_ids) == len(generation.logprobs) == 5 and generation.version_spans == [(0, 5)]


def test_a_fit_finds_the_coefficients_and_none_below_zero():
    rows = np.array([[1.0, 10.0, 5.0], [2.0, 10.0, 1.0], [3.0, 40.0, 2.0], [4.0, 5.0, 9.0]])
    values, off = fit(rows, rows @ [2.0, 0.5, 0.0])
    assert values == pytest.approx([2.0, 0.5, 0.0], abs=1e-9) and off < 1e-9
    assert min(fit(rows, rows @ [2.0, 0.5, -0.1])[0]) >= 0


def test_bytes_of_a_batch_are_those_that_the_model_counts():
    found = measure_bytes()
    assert found["batch_bytes_per_token"] == pytest.approx(CELL + SAMPLED / 2, rel=0.01)  # half of them are sampled
    assert found["turn_bytes_per_token"] > 30 and found["sample_bytes_per_token"] > 30


def test_routing_and_choosing_are_measured():
    assert route(2, 2) > 0 and measure_choosing(1, batch=64)["choose_per_group"] > 0


def test_a_single_rank_measures_each_size():
    lines = measure(RankGroup(World(), Silent()), repeats=1)
    assert [line["batches"] for line in lines] == list(SHARES)
    sizes = [line["bytes_per_rank"] for line in lines]
    assert sizes[2] == pytest.approx(2 * sizes[1], rel=0.01) and sizes[0] < 100
