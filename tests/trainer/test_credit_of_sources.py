"""Advantages of a mixture: estimators that normalise over the batch do so for each source separately."""

import pytest

from mtrl.algorithms.advantages import turn_advantages
from mtrl.config.algorithm_schema import AlgorithmConfig
from mtrl.config.schema import RewardConfig
from mtrl.rewards.compose import RewardComposer
from mtrl.rewards.mixture import MixedComposer
from mtrl.rollout.rollouts import RolloutReport
from mtrl.trainer.data.samples import advantages_of
from mtrl.trainer.rollout_metrics import source_metrics
from mtrl.types import Trajectory
from tests.trainer.helpers import make_group

SOURCES = ("a", "b", "a", "b", "a")


@pytest.fixture
def groups():
    made = [make_group(seed, 50, size=3) for seed in range(len(SOURCES))]
    for name, group in zip(SOURCES, made, strict=True):
        group.row = {"id": f"{name}/{group.group_id}"}
        for turn in (turn for trajectory in group.trajectories for turn in trajectory.turns):
            turn.reward *= 100.0 if name == "b" else 1.0
    return made


@pytest.mark.parametrize("method", ["reinforce_pp", "reinforce_pp_baseline", "turn_rloo"])
def test_the_advantages_of_a_source_are_those_of_a_batch_without_the_other_sources(groups, method):
    config = AlgorithmConfig(advantage_method=method)
    mixed = MixedComposer({name: RewardComposer(RewardConfig()) for name in "ab"})
    found = advantages_of(groups, config, mixed)
    for name in "ab":
        places = [place for place, source in enumerate(SOURCES) if source == name]
        alone = turn_advantages([groups[place] for place in places], config)
        assert [found[place] for place in places] == alone
    one = advantages_of(groups, config, RewardComposer(RewardConfig()))
    assert one == turn_advantages(groups, config) and (one == found) == (method == "turn_rloo")


def test_metrics_of_a_source_are_means_over_its_own_episodes(groups):
    for group in groups:
        for trajectory in group.trajectories:
            trajectory.score = float(group.row["id"].startswith("b"))
    failures = [Trajectory("b/7", "step1/0", index) for index in range(2)]
    metrics = source_metrics(RolloutReport(groups, failures), ("a", "b", "c"))
    assert (metrics["rollout/a/success/mean"], metrics["rollout/b/success/mean"]) == (0.0, 1.0)
    assert [metrics[f"rollout/{name}/groups"] for name in "abc"] == [3.0, 2.0, 0.0]
    assert [metrics[f"rollout/{name}/failed_episodes"] for name in "abc"] == [0.0, 2.0, 0.0]
    assert metrics["rollout/b/reward/mean"] > 20 * metrics["rollout/a/reward/mean"]
    assert {key for key in metrics if "/c/" in key} == {"rollout/c/groups", "rollout/c/failed_episodes"}
