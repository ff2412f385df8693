"""The audit of killed workers, with workers in this process: no group is lost or trained twice at any moment of a kill,
and the audit reports what would be wrong."""

import asyncio
import sys
from functools import partial
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from in_memory import InMemoryCluster

from mtrl.engines.base import SamplingParams
from mtrl.rollout import workers as module
from mtrl.rollout.rollouts import Rollouts

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments" / "kills"))

from worker_kills import Result, Sizes, audit_group, loop_of, row_of, run, table


def play(sizes):
    cluster = InMemoryCluster(partial(loop_of, sizes), sizes.seed)

    def kill_one(rng):
        if found := cluster.alive:
            cluster.kill(rng.choice(found))
        return bool(found)

    return asyncio.run(run(sizes, cluster, kill_one))


@settings(max_examples=6, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(0, 2))
def test_every_group_is_trained_once_within_the_bound(seed, workers, lag):
    sizes = Sizes(workers, 6, 4, 2, 2, 0.001, 0.001, lag, kills=5, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_DEATHS", 1000)  # more kills than groups would otherwise fail some of them
        result = play(sizes)
    assert not result.audit.faults
    assert result.episodes == 48 and 0 < result.kills <= 5 and result.oldest <= lag
    assert table(sizes, result).splitlines()[2].startswith(f"| 48 | {result.kills} |")


def test_tokens_of_another_episode_and_too_old_ones_are_faults():
    sizes, result = Sizes(group_size=2, seed=1), Result()
    group = asyncio.run(Rollouts(loop_of(sizes), 0, 0.0).group("step0/0", row_of(0), 2, SamplingParams()))
    audit_group(group, 2, sizes, result)
    assert result.audit.differences == [
        f"step0/0/{index} has tokens {fault}"
        for index in (0, 1)
        for fault in ("of another episode", "that are 2 to 2 steps old")
    ]
