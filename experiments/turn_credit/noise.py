"""The noise of a gradient with six independent turn rewards, for the estimators of the study.

    python -m experiments.turn_credit.noise

Turn t of a trajectory is right with probability p, by a logit of its own, and a right turn gets 1/6. The gradient of a
group of 8 trajectories is 1/8 sum_i sum_t A_it d log pi_it; its noise is the standard deviation over groups divided by
the length of its expectation. The script samples 4,000 groups, so the printed numbers are right within about 2 %.
"""

from __future__ import annotations

import numpy as np

from mtrl.algorithms.advantages import estimate
from mtrl.algorithms.batch import CreditBatch
from mtrl.config.algorithm_schema import AlgorithmConfig
from mtrl.types import FinishReason, Group, StopReason, Trajectory, Turn

TURNS, SIZE, GROUPS = 6, 8, 4_000
ARMS = {
    "rloo, trajectory": AlgorithmConfig(advantage_method="rloo", credit="trajectory"),
    "rloo, turn+outcome": AlgorithmConfig(advantage_method="turn_rloo"),
    "grpo, trajectory": AlgorithmConfig(advantage_method="grpo"),
    "mt_grpo": AlgorithmConfig(advantage_method="mt_grpo"),
}
"""The arms of the study whose advantages follow from rewards alone."""


def noise(right: np.ndarray, p: float, algorithm: AlgorithmConfig, at_the_end: bool = False) -> float:
    """Standard deviation of the gradient of a group, divided by the length of the expected gradient.

    Args:
        right: [groups, SIZE, TURNS] whether a turn is right.
        p: probability that a turn is right.
        algorithm: configuration of the advantages.
        at_the_end: give the sum of all rewards to the last turn, and no reward to the other turns.
    """
    rewards = right / TURNS
    if at_the_end:
        rewards = np.concatenate([np.zeros_like(rewards[..., 1:]), rewards.sum(-1, keepdims=True)], axis=-1)
    batch = CreditBatch.of([_group(number, rows) for number, rows in enumerate(rewards)])
    advantages = estimate(batch, algorithm).reshape(right.shape)
    gradients = (advantages * np.where(right, 1 - p, -p)).mean(axis=1)
    return float(np.sqrt(gradients.var(axis=0).sum()) / np.linalg.norm(gradients.mean(axis=0)))


def _group(number: int, rewards: np.ndarray) -> Group:
    name = f"group {number}"
    made = [Trajectory(name, name, index, _turns(row), StopReason.DONE) for index, row in enumerate(rewards)]
    return Group(name, {}, made)


def _turns(rewards: np.ndarray) -> list[Turn]:
    message = {"role": "assistant", "content": ""}
    return [
        Turn([1], [2], [-1.0], [(0, 1)], FinishReason.STOP, "", message, reward=float(reward)) for reward in rewards
    ]


def main() -> None:
    print(
        "| advantages | turn rewards, p = 0.35 | p = 0.5 | p = 0.8 | one at the end, p = 0.5 |\n|---|---|---|---|---|"
    )
    for name, algorithm in ARMS.items():
        cells = []
        for p, at_the_end in ((0.35, False), (0.5, False), (0.8, False), (0.5, True)):
            right = np.random.default_rng(0).random((GROUPS, SIZE, TURNS)) < p
            cells.append(f"{noise(right, p, algorithm, at_the_end):.2f}")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
