"""Episodes that a caller steps: the limits of scoring are those of training."""

import asyncio
import time

from mtrl.config.schema import RewardConfig
from mtrl.environments.pool import EnvironmentPool
from mtrl.play.episode import Rules, judge
from mtrl.rewards.compose import RewardComposer
from tests.envs.episodes import trajectory_of


def test_scoring_may_take_longer_than_a_step():
    """As in training, `environment.episode_timeout` limits it, and not `environment.step_timeout`."""

    def slow(trajectory, row):
        time.sleep(0.05)
        return 1.0

    rules = Rules(lambda: None, EnvironmentPool(1), 1, step_timeout=0.01, episode_timeout=60.0)
    trajectory = trajectory_of(["x"], [1.0])
    asyncio.run(judge(trajectory, {"id": "a", "ground_truth": {}}, rules, RewardComposer(RewardConfig()), slow))
    assert trajectory.error is None and trajectory.score == 1.0
