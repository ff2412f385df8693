"""Rollout workers on a cluster of several nodes of Ray, each a raylet of this machine with processes of its own."""

import asyncio
import os
import signal
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from digits import Digits
from test_ray_workers import ROWS, SAMPLING, ids, pids

import mtrl
from mtrl.errors import UserError
from mtrl.rollout.cluster import RayCluster
from mtrl.rollout.resources import WorkerResources
from mtrl.rollout.rollouts import Rollouts
from mtrl.rollout.workers import WorkerRollouts, Workers

LICENSED, OLD = WorkerResources(1.0, custom={"license": 1}), WorkerResources(1.0, custom={"old": 1})
SMALL = {"num_cpus": 4, "object_store_memory": 80 * 2**20, "include_dashboard": False}


@pytest.fixture
def nodes(monkeypatch, tmp_path):
    """A cluster, and its nodes by name: alpha is its head and has another version of mtrl; beta has two licenses, and
    gamma has one."""
    from ray.cluster_utils import Cluster

    handler, path = signal.getsignal(signal.SIGTERM), os.pathsep.join(entry for entry in sys.path if entry)
    (tmp_path / "mtrl").mkdir()
    (tmp_path / "mtrl/__init__.py").write_text(f"__version__ = '0.0.1'\n__path__ = {list(mtrl.__path__)}\n")
    monkeypatch.chdir(tmp_path.parent)  # workers import from the leader's folder first
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{path}")
    cluster = Cluster(initialize_head=True, head_node_args={**SMALL, "node_name": "alpha", "resources": {"old": 1}})
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    found = {name: cluster.add_node(**SMALL, node_name=name, resources={"license": n}) for name, n in
             (("beta", 2), ("gamma", 1))}  # fmt: skip
    try:
        yield cluster, found
    finally:
        cluster.shutdown()
        signal.signal(signal.SIGTERM, handler)


def parent(pid):
    """Return the parent of a process: the raylet of its node."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
@pytest.mark.ci
def test_workers_of_several_nodes(nodes):
    cluster, found = nodes
    raylets = {name: node.all_processes["raylet"][0].process.pid for name, node in found.items()}
    make = partial(Digits, 3, 0.02)

    async def play(workers):
        rollouts = WorkerRollouts(make(), 0, 0.0, workers=workers)
        first = (await rollouts.collect("first", ROWS, 2, SAMPLING)).groups
        parents = Counter(map(parent, pids(first)))
        second = asyncio.ensure_future(rollouts.collect("second", ROWS, 2, SAMPLING))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(cluster.remove_node, found["beta"], False)
        second = (await second).groups
        while workers.stats.extra["workers"] > 1:  # until the deaths of the node's processes are known
            await asyncio.sleep(0.05)
        await workers.load_weights(None, 1)
        third = (await rollouts.collect("third", ROWS, 2, SAMPLING)).groups
        playing = workers.stats.extra["workers"]
        await workers.close()
        return first, second, third, parents, playing

    processes = RayCluster((make, 0), 3, LICENSED, 4000)
    refused = Workers(RayCluster((make, 0), 1, OLD, 4000), 1, 600.0)
    with pytest.raises(UserError, match=r"node alpha: this machine has mtrl 0\.0\.1 instead of .*; install the ver"):
        asyncio.run(refused.start())
    workers = Workers(processes, 3, 600.0)
    asyncio.run(workers.start())
    first, second, third, parents, playing = asyncio.run(play(workers))

    async def alone(key):
        return (await Rollouts(Digits(), 0, 0.0).collect(key, ROWS, 2, SAMPLING)).groups

    for key, groups in (("first", first), ("second", second), ("third", third)):
        assert ids(groups) == ids(asyncio.run(alone(key)))
    assert parents == {raylets["beta"]: 2, raylets["gamma"]: 1}
    assert pids(third) < pids(first) and playing == 1
    assert {t.oldest_version for group in third for t in group.trajectories} == {1}
