"""Rollout workers without Ray: the division of groups, lost workers, and the acknowledgement of weights."""

import asyncio
import random
from functools import partial

import pytest
from digits import Digits
from in_memory import InMemoryCluster

from mtrl.engines.base import EngineLostError, EngineStats, SamplingParams
from mtrl.errors import UserError
from mtrl.rollout import workers as module
from mtrl.rollout.rollouts import Rollouts
from mtrl.rollout.workers import MAX_DEATHS, WorkerRollouts, Workers
from mtrl.types import StopReason

SAMPLING = SamplingParams(max_generate_length=8)


def rows(count):
    return [{"id": f"row{n}", "prompt": [{"role": "user", "content": "hi"}], "ground_truth": {}} for n in range(count)]


def plain(trajectory):
    """Return the part of a trajectory that does not depend on time."""
    turns = [(turn.observation_ids, turn.action_ids, turn.version_spans, turn.reward) for turn in trajectory.turns]
    return trajectory.task_id, trajectory.group_id, trajectory.index, trajectory.stop_reason, turns


def collect(cluster, loop, count, groups=8, beside=None, version=None):
    """Sample groups by `count` workers, with `beside(workers)` at the same time. Return the groups and statistics."""

    async def play():
        workers = Workers(cluster, count, timeout=60)
        await workers.start()
        try:
            rollouts = WorkerRollouts(loop, 0, 0.5, workers=workers)
            if version is not None:
                await workers.load_weights(None, version)
            other = asyncio.ensure_future(beside(workers)) if beside else None
            report = await rollouts.collect("step0", rows(groups), 2, SAMPLING)
            if other:
                other.cancel()
            return report, workers.stats
        finally:
            await workers.close()

    return asyncio.run(play())


@pytest.mark.parametrize("count", [1, 3])
def test_groups_are_those_of_one_process(count):
    alone = asyncio.run(Rollouts(Digits(), 0, 0.5).collect("step0", rows(8), 2, SAMPLING))
    cluster = InMemoryCluster(Digits)
    report, stats = collect(cluster, Digits(), count)
    assert [group.group_id for group in report.groups] == [group.group_id for group in alone.groups]
    assert [[plain(t) for t in g.trajectories] for g in report.groups] == [
        [plain(t) for t in g.trajectories] for g in alone.groups
    ]
    assert stats.extra == {"workers": count, "worker_restarts": 0}
    assert cluster.is_closed and not cluster.alive


def test_groups_are_divided_evenly_and_sent_together(monkeypatch):
    cluster, sent = InMemoryCluster(Digits), []
    tell = cluster.tell
    monkeypatch.setattr(
        cluster,
        "tell",
        lambda worker, method, *args: (sent.append((method, len(args[0]))), tell(worker, method, *args)),
    )
    collect(cluster, Digits(), 3)
    assert sent == [("play", 3), ("play", 3), ("play", 2)]


def test_groups_of_killed_workers_are_played_again_and_none_twice(monkeypatch):
    """A worker is killed after each fifth group that is delivered."""
    monkeypatch.setattr(module, "MAX_DEATHS", 1000)
    cluster, rng, names, delivered = InMemoryCluster(partial(Digits, 3, 0.001)), random.Random(0), {}, []
    call, tell = cluster.call, cluster.tell

    def kill():
        if cluster.alive:
            cluster.kill(rng.choice(cluster.alive))

    def noting_names(process, method, *args):
        if method == "play":
            names.update({request.number: request.group_id for request in args[0]})
        tell(process, method, *args)

    async def noting_answers(process, method, *args):
        result = await call(process, method, *args)
        for answer in result.answers if method == "results" else ():
            delivered.append(names[answer.number])
            if len(delivered) % 5 == 0:
                asyncio.get_running_loop().call_soon(kill)
        return result

    monkeypatch.setattr(cluster, "tell", noting_names)
    monkeypatch.setattr(cluster, "call", noting_answers)
    groups = 100
    report, stats = collect(cluster, Digits(), 3, groups)
    expected = [f"step0/{n}" for n in range(groups)]
    assert [group.group_id for group in report.groups] == expected and sorted(delivered) == sorted(expected)
    assert not report.failures and all(t.stop_reason == StopReason.DONE for g in report.groups for t in g.trajectories)
    assert stats.extra["worker_restarts"] > 5


def test_a_group_that_kills_its_workers_fails_alone():
    cluster = InMemoryCluster(None)

    class Deadly(Digits):
        async def _run_episode(self, trajectory, handle, row, sampling):
            if trajectory.group_id == "step0/3":
                cluster.kill(next(one for one in cluster.alive if one.loop is self))
                await asyncio.sleep(60)
            await super()._run_episode(trajectory, handle, row, sampling)

    cluster.make = partial(Deadly, 3, 0.001)
    report, stats = collect(cluster, Digits(), 1, groups=4)
    assert {t.group_id for t in report.failures} == {"step0/3"} and len(report.failures) == 2
    assert f"lost {MAX_DEATHS} times" in report.failures[0].error and stats.extra["worker_restarts"] == MAX_DEATHS


def test_statistics_of_lost_workers_are_kept_without_their_queues():
    """Each engine reports one retry and five turns in its queue; the second worker takes the place of the first."""

    class Queued(Digits):
        def __init__(self):
            super().__init__()
            self.engine.stats = EngineStats(10, extra={"retries": 1.0, "waiting": 5.0, "idle": 0.0})

    async def play():
        cluster = InMemoryCluster(Queued)
        workers = Workers(cluster, 1, timeout=60)
        await workers.start()
        rollouts = WorkerRollouts(Digits(), 0, 0.5, workers=workers)
        try:
            await rollouts.collect("step0", rows(1), 2, SAMPLING)
            cluster.kill(cluster.alive[0])
            await rollouts.collect("step1", rows(1), 2, SAMPLING)
            return workers.stats
        finally:
            await workers.close()

    extra = {"workers": 1, "worker_restarts": 1, "retries": 2, "waiting": 5, "idle": 0}
    assert asyncio.run(play()) == EngineStats(20, extra=extra)


def test_a_version_counts_when_every_worker_has_confirmed_it(monkeypatch):
    """Processes are also killed while they start, on a slow machine three times in a row, which ends a run."""
    monkeypatch.setattr(module, "MAX_DEATHS", 99)
    cluster, seen = InMemoryCluster(partial(Digits, 3, 0.002)), []

    async def play():
        workers = Workers(cluster, 3, timeout=60)
        await workers.start()
        rollouts, rng = WorkerRollouts(Digits(), 0, 1.0, workers=workers), random.Random(1)

        async def group(n):
            admitted = workers.version
            group = await rollouts.group(f"step{n}/0", rows(1)[0], 2, SAMPLING)
            seen.extend((admitted, t.oldest_version) for t in group.trajectories if t.action_tokens)

        tasks = []
        for version in range(1, 15):
            tasks += [asyncio.ensure_future(group(10 * version + n)) for n in range(4)]
            await asyncio.sleep(0.003 * rng.random())
            if rng.random() < 0.5 and cluster.alive:
                cluster.kill(rng.choice(cluster.alive))
            await workers.load_weights(None, version)
            live = [process.loop.engine.version for process in cluster.alive if not process.is_starting]
            assert workers.version == version and set(live) == {version}
            assert len(live) == workers.stats.extra["workers"] > 0
        await asyncio.gather(*tasks)
        await workers.close()

    asyncio.run(play())
    assert len(seen) > 50 and all(oldest >= admitted for admitted, oldest in seen)


def test_a_new_process_has_the_newest_weights_before_it_plays():
    cluster = InMemoryCluster(partial(Digits, 3, 0.001))

    async def kill(workers):
        await asyncio.sleep(0.005)
        cluster.kill(cluster.alive[0])

    report, _ = collect(cluster, Digits(), 1, 20, kill, version=7)
    assert {t.oldest_version for g in report.groups for t in g.trajectories} == {7}


def test_a_worker_that_cannot_start_is_one_sentence():
    def broken():
        raise UserError("environment.config.level=9 is too high")

    cluster = InMemoryCluster(broken)
    with pytest.raises(UserError, match="level=9 is too high"):
        collect(cluster, Digits(), 2)
    assert cluster.is_closed and not cluster.alive


def test_workers_that_cannot_start_again_end_the_run():
    cluster = InMemoryCluster(partial(Digits, 3, 0.001))

    async def ruin(workers):
        cluster.make = partial(lambda: 1 / 0)
        cluster.kill(cluster.alive[0])

    with pytest.raises(EngineLostError, match="worker 0 was lost and cannot be started again"):
        collect(cluster, Digits(), 1, 20, ruin)


def test_a_silent_worker_is_replaced(monkeypatch):
    monkeypatch.setattr(module, "POLL_SECONDS", 0.05)
    cluster = InMemoryCluster(Digits)

    async def play():
        workers = Workers(cluster, 1, timeout=60)
        await workers.start()

        def silent(received):
            workers.timeout = 60  # the new process has more time, since the machine may be busy
            return asyncio.sleep(3600)

        cluster.processes[0].worker.results, workers.timeout = silent, 0.05
        rollouts = WorkerRollouts(Digits(), 0, 0.5, workers=workers)
        report = await rollouts.collect("step0", rows(2), 2, SAMPLING)
        await workers.close()
        return report

    report = asyncio.run(play())
    assert not report.failures and len(cluster.processes) == 2


def test_an_aborted_group_ends_in_its_worker():
    open_episodes = []

    class Counting(Digits):
        async def _run_episode(self, trajectory, handle, row, sampling):
            open_episodes.append(trajectory)
            try:
                await asyncio.sleep(60)
            finally:
                open_episodes.remove(trajectory)

    cluster = InMemoryCluster(Counting)

    async def play():
        workers = Workers(cluster, 1, timeout=60)
        await workers.start()
        task = asyncio.ensure_future(workers.group("step0/0", rows(1)[0], 2, SAMPLING))
        while len(open_episodes) < 2:
            await asyncio.sleep(0.001)
        task.cancel()
        while open_episodes:
            await asyncio.sleep(0.001)
        assert not cluster.killed
        await workers.close()

    asyncio.run(play())


def test_errors_of_a_worker_are_raised_by_the_leader():
    class Lost(Digits):
        async def _run_episode(self, trajectory, handle, row, sampling):
            raise EngineLostError("no GPU is left")

    with pytest.raises(EngineLostError, match="no GPU is left"):
        collect(InMemoryCluster(Lost), Digits(), 2)


def test_rows_that_cannot_be_sent_are_one_sentence(monkeypatch):
    cluster = InMemoryCluster(Digits)

    def refuse(worker, method, *args):
        raise TypeError("cannot pickle '_thread.lock' object")

    monkeypatch.setattr(cluster, "tell", refuse)
    with pytest.raises(UserError, match=r"cannot be sent to a rollout worker \(cannot pickle .*workers=0"):
        collect(cluster, Digits(), 1)


def test_a_run_goes_on_without_the_workers_that_have_no_room(monkeypatch, caplog):
    """A machine with two of three workers is lost. The third runs their groups, until a machine is there again."""
    monkeypatch.setattr(module, "ROOM_SECONDS", 0.01)
    cluster = InMemoryCluster(partial(Digits, 3, 0.005))

    async def play():
        workers = Workers(cluster, 3, timeout=60)
        await workers.start()
        rollouts = WorkerRollouts(Digits(), 0, 0.0, workers=workers)
        groups = asyncio.ensure_future(rollouts.collect("step0", rows(60), 2, SAMPLING))
        await asyncio.sleep(0.01)
        cluster.free_room = 1
        for process in cluster.alive[:2]:
            cluster.kill(process)
        report = await groups
        left = len(cluster.alive), workers.stats.extra["workers"], workers.stats.extra["worker_restarts"]
        cluster.free_room = 3
        while workers.stats.extra["workers"] < 3:
            await asyncio.sleep(0.01)
        await workers.close()
        return report, left

    report, left = asyncio.run(asyncio.wait_for(play(), 60))
    assert len(report.groups) == 60 and report.episodes == 120 and not report.failures
    assert left == (1, 1, 0) and "rollout worker 0 waits, because the cluster has no room for it" in caplog.text


def test_a_process_for_which_ray_has_no_place_does_not_end_the_run(monkeypatch):
    """Ray takes a process while it still counts the room of a lost machine; the process never starts."""
    for name in ("ROOM_SECONDS", "POLL_SECONDS"):
        monkeypatch.setattr(module, name, 0.01)
    monkeypatch.setattr("mtrl.rollout.worker.POLL_SECONDS", 0.01)
    cluster = InMemoryCluster(partial(Digits, 3, 0.005))

    def lose_a_machine(workers):
        spawn = cluster.spawn

        def never_starts(index):
            cluster.free_room, cluster.spawn, workers.timeout = 1, spawn, 0.05
            process = spawn(index)
            process.worker.start = start
            return process

        def start():
            workers.timeout = 60  # for all other calls, since the machine may be busy
            return asyncio.sleep(3600)

        cluster.free_room, cluster.spawn = 2, never_starts
        cluster.kill(cluster.alive[0])

    async def play():
        workers = Workers(cluster, 2, timeout=60)
        await workers.start()
        lose_a_machine(workers)
        rollouts = WorkerRollouts(Digits(), 0, 0.0, workers=workers)
        report = await rollouts.collect("step0", rows(60), 2, SAMPLING)
        while len(cluster.processes) < 3 or not cluster.processes[2].is_dead:
            await asyncio.sleep(0.01)
        cluster.free_room = 2
        while workers.stats.extra["workers"] < 2:
            await asyncio.sleep(0.01)
        await workers.close()
        return report

    assert len(asyncio.run(asyncio.wait_for(play(), 60)).groups) == 60


def test_a_cluster_without_room_for_any_worker_ends_the_run(monkeypatch):
    monkeypatch.setattr(module, "ROOM_SECONDS", 0.01)
    cluster = InMemoryCluster(partial(Digits, 3, 0.005))

    async def play():
        workers = Workers(cluster, 2, timeout=0.1)
        await workers.start()
        cluster.free_room = 0
        for process in cluster.alive:
            cluster.kill(process)
        try:
            await workers.group("step0/0", rows(1)[0], 2, SAMPLING)
        finally:
            await workers.close()

    with pytest.raises(EngineLostError, match=r"no room for rollout worker \d within rollouts.timeout=0.1 s"):
        asyncio.run(play())


def test_the_error_of_an_episode_names_the_machine(monkeypatch):
    class Broken(Digits):
        async def _run_episode(self, trajectory, handle, row, sampling):
            raise FileNotFoundError("shop.sqlite")

    cluster = InMemoryCluster(Broken)
    monkeypatch.setattr(cluster, "place", lambda process: "node b7")

    async def play():
        workers = Workers(cluster, 1, timeout=60)
        await workers.start()
        try:
            return await workers.group("step0/0", rows(1)[0], 2, SAMPLING)
        finally:
            await workers.close()

    assert [t.error.partition("\n")[0] for t in asyncio.run(play())] == ["node b7: FileNotFoundError: shop.sqlite"] * 2
