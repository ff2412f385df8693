"""Reward against scorer on one trajectory."""

import pytest

from mtrl.config.schema import EvaluationConfig
from mtrl.scoring.agreement import Thresholds, TrajectoryAgreement, claimed, succeeded
from mtrl.types import FinishReason, Trajectory, Turn


def rewarded(reward: float, score: float | None) -> Trajectory:
    turn = Turn([1], [2], [-0.1], [(0, 1)], FinishReason.STOP, "", {"role": "assistant", "content": ""}, reward=reward)
    return Trajectory("t", "g", 0, [turn], score=score)


@pytest.mark.parametrize(
    ("reward", "score", "verdict"),
    [
        (1.0, 1.0, TrajectoryAgreement.AGREE),
        (0.3, 0.0, TrajectoryAgreement.AGREE),
        (1.0, 0.0, TrajectoryAgreement.LENIENT),
        (0.99, 1.0, TrajectoryAgreement.STRICT),
        (1.0, None, TrajectoryAgreement.AGREE),  # not scored
        (0.0, 0.5, TrajectoryAgreement.AGREE),  # a partial score is no success
    ],
)
def test_the_verdicts(reward, score, verdict):
    assert Thresholds().verdict(rewarded(reward, score)) == verdict


def test_a_sum_of_rewards_that_misses_one_by_a_rounding_is_a_success():
    trajectory = rewarded(0.1, 1.0)
    trajectory.turns *= 10
    assert trajectory.reward != 1.0
    assert claimed(trajectory)
    assert succeeded(rewarded(0, 1 - 1e-12))


def test_the_reward_has_a_threshold_of_its_own_where_the_configuration_gives_one():
    assert Thresholds.of(EvaluationConfig(success_threshold=0.5)) == Thresholds(0.5, 0.5)
    own = Thresholds.of(EvaluationConfig(success_threshold=1.0, claim_threshold=2.0))
    assert own == Thresholds(1.0, 2.0)
    assert own.verdict(rewarded(1.5, 0.0)) == TrajectoryAgreement.AGREE
    assert own.verdict(rewarded(2.0, 0.0)) == TrajectoryAgreement.LENIENT
