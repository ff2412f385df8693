"""Rollout workers on Ray: the same groups as in one process, killed processes, new weights, and remaining processes."""

import asyncio
import os
import signal
import socket
from functools import partial
from pathlib import Path

import pytest
from digits import Digits
from toy_turns import ToyTurns

from mtrl.engines.base import SamplingParams
from mtrl.engines.server.backend import ServerBackend
from mtrl.engines.server.remote import RemoteServerEngine
from mtrl.errors import UserError
from mtrl.rollout.cluster import RayCluster
from mtrl.rollout.resources import WorkerResources
from mtrl.rollout.rollouts import Rollouts
from mtrl.rollout.served_workers import ServedWorkers
from mtrl.rollout.workers import WorkerRollouts, Workers
from tests.engines.server.toy_http_api import HttpApi, make_http_engine
from tests.engines.server.toy_servers import CONTEXT, VOCABULARY, weights_of

ROWS = [{"id": f"row{n}", "prompt": [{"role": "user", "content": "hi"}], "ground_truth": {}} for n in range(40)]
RESOURCES = WorkerResources(1.0, memory=2**20, custom={"license": 0.5})
SAMPLING = SamplingParams(max_generate_length=4)


def ids(groups):
    return [[(t.group_id, t.index, [turn.action_ids for turn in t.turns]) for t in g.trajectories] for g in groups]


def pids(groups):
    return {int(t.metrics["pid"]) for group in groups for t in group.trajectories}


def children():
    """Return the ids of all descendants of this process."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def runs(pid):
    """Whether a process runs; one that has ended and has no parent that waits for it does not."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def is_reachable(port):
    """Whether a port of this machine can be reached at another address than the loopback interface's."""
    addresses = {entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for address in addresses - {"127.0.0.1"}:
        with socket.socket() as probe:
            probe.settimeout(5)
            if not address.startswith("127.") and probe.connect_ex((address, port)) == 0:
                return True
    return False


def ports_of(processes):
    """Return the ports of IPv4 and IPv6 on which these processes listen."""
    inodes = set()
    for pid in processes:
        for file in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                inodes.add(os.readlink(file))
            except OSError:
                continue
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table]
    return {int(one[1].rpartition(":")[2], 16) for one in lines if one[3] == "0A" and f"socket:[{one[9]}]" in inodes}


@pytest.mark.slow
def test_workers_of_ray(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "local")
    before, handler, environment = children(), signal.getsignal(signal.SIGTERM), {**os.environ}
    make = partial(Digits, 3, 0.02)

    async def play(workers):
        rollouts = WorkerRollouts(make(), 0, 0.5, workers=workers)
        first = (await rollouts.collect("first", ROWS, 2, SAMPLING)).groups
        await workers.load_weights(None, 1)

        async def kill():
            await asyncio.sleep(0.01)
            os.kill(min(pids(first)), signal.SIGKILL)

        killing = asyncio.ensure_future(kill())
        second = await rollouts.collect("second", ROWS, 2, SAMPLING)
        await killing
        while workers.stats.extra["workers"] < 2:
            await asyncio.sleep(0.1)
        third = (await rollouts.collect("third", ROWS, 2, SAMPLING)).groups
        stats, started = workers.stats, children() - before
        open_ports = [port for port in ports_of(started) if is_reachable(port)]
        await workers.close()
        return first, second, third, stats, started, open_ports

    cluster = RayCluster((make, 0), 2, RESOURCES, 4000)
    with pytest.raises(UserError, match="each worker reserves 1 CPUs, 2 license, and Ray has room for 0 of them"):
        RayCluster((make, 0), 2, WorkerResources(custom={"license": 2}), 4000)
    workers = Workers(cluster, 2, 600.0)
    asyncio.run(workers.start())
    assert signal.getsignal(signal.SIGTERM) is handler
    changed = {name for name in {**os.environ} | environment if os.environ.get(name) != environment.get(name)}
    assert all(name.startswith("RAY_") for name in changed)
    first, second, third, stats, started, open_ports = asyncio.run(play(workers))

    async def alone(key):
        return (await Rollouts(Digits(), 0, 0.5).collect(key, ROWS, 2, SAMPLING)).groups

    for key, groups in (("first", first), ("second", second.groups), ("third", third)):
        assert ids(groups) == ids(asyncio.run(alone(key)))
    assert len(pids(first)) == len(pids(third)) == 2 and not pids(third) <= pids(first)
    assert not second.failures and second.episodes == 80 and stats.extra["worker_restarts"] == 1
    assert {t.oldest_version for g in (*second.groups, *third) for t in g.trajectories} == {1}
    assert started and not open_ports
    assert not [pid for pid in started if runs(pid)]


def served_turns(settings):
    """Make the loop of the episodes of a worker whose turns are sampled by servers of the toy model."""
    backend = ServerBackend("toy", settings, HttpApi, lambda place: None)
    return ToyTurns(RemoteServerEngine(backend, vocabulary=VOCABULARY, context=CONTEXT, limit=4))


@pytest.mark.slow
@pytest.mark.ci
def test_workers_of_ray_send_their_turns_to_servers(monkeypatch, tmp_path):
    """Two workers and two servers; a server and a worker are killed while turns are sampled."""
    monkeypatch.setenv("RAY_ADDRESS", "local")
    rows, sampling = [{**row, "id": str(n)} for n, row in enumerate(ROWS)], SamplingParams(max_generate_length=8)
    servers = make_http_engine(tmp_path, replicas=2)

    async def play(workers):
        ended = asyncio.Event()
        rollouts = WorkerRollouts(ToyTurns(None), 0, 0.0, lambda trajectory: ended.set(), workers=workers)
        first = asyncio.ensure_future(rollouts.collect("first", rows[:10], 2, sampling))
        await asyncio.wait_for(ended.wait(), 300)
        await workers.load_weights(weights_of(1), 1)
        first = (await first).groups
        ended.clear()
        second = asyncio.ensure_future(rollouts.collect("second", rows, 2, sampling))
        await asyncio.wait_for(ended.wait(), 300)
        os.kill(servers.server_group.replicas[0].process.pid, signal.SIGKILL)
        os.kill(min(pids(first)), signal.SIGKILL)
        second = (await second).groups
        stats, running = workers.stats, [replica.process.pid for replica in servers.server_group.replicas]
        await workers.close()
        return first, second, stats, running

    cluster = RayCluster((partial(served_turns, servers.backend.settings), 0), 2, WorkerResources(1.0), 4000)
    workers = ServedWorkers(cluster, 2, 600.0, servers)
    asyncio.run(workers.start())
    first, second, stats, running = asyncio.run(play(workers))
    oldest = [{t.oldest_version for group in groups for t in group.trajectories} for groups in (first, second)]
    assert len(first) == 10 and len(second) == 40 and 0 in oldest[0] and oldest[1] == {1}
    assert stats.extra["worker_restarts"] == stats.extra["restarts"] == 1 and stats.extra["resent"] > 0
    assert len(running) == 2 and not any(map(runs, running))
