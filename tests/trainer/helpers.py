"""Trajectories with random tokens, for tests of the work after the rollouts."""

import random

from mtrl.types import FinishReason, Group, StopReason, Trajectory, Turn


def make_turn(rng: random.Random, vocabulary: int, break_reason: str | None = None, reward: float = 0.0) -> Turn:
    ids = [rng.randrange(vocabulary) for _ in range(rng.randint(1, 6))]
    return Turn(
        observation_ids=[rng.randrange(vocabulary) for _ in range(rng.randint(1, 8))],
        action_ids=ids,
        action_logprobs=[-rng.random() * 6 for _ in ids],
        version_spans=[(0, len(ids))],
        finish=FinishReason.STOP,
        text="",
        message={"role": "assistant", "content": ""},
        reward=reward,
        break_reason=break_reason,
    )


def make_group(seed: int, vocabulary: int, size: int = 4, turns: int = 3) -> Group:
    rng = random.Random(seed)
    trajectories = [
        Trajectory(
            task_id="t",
            group_id=f"g{seed}",
            index=i,
            turns=[make_turn(rng, vocabulary, reward=rng.random()) for _ in range(rng.randint(1, turns))],
            stop_reason=StopReason.DONE,
        )
        for i in range(size)
    ]
    return Group(f"g{seed}", {"id": "t"}, trajectories)


def split_by_turn(trajectory: Trajectory) -> Trajectory:
    """Return the same episode as one sample per turn: every turn repeats its whole context."""
    turns, context = [], []
    for turn in trajectory.turns:
        context = context + turn.observation_ids
        whole = Turn(**{**vars(turn), "observation_ids": list(context), "break_reason": "template"})
        turns.append(whole)
        context = context + turn.action_ids
    return Trajectory(**{**vars(trajectory), "turns": turns})
