"""Generated rollouts for the tests of measures and reports."""

import re

from mtrl.config.schema import Config, EvaluationConfig
from mtrl.datasets import Splits
from mtrl.environments.family import Family
from mtrl.evaluation.rollouts import ModelRollouts, Source
from mtrl.types import FinishReason, Group, StopReason
from tests.envs.episodes import trajectory_of


def made_episode(
    answer="#### 1", score=0.0, reward=None, stop=StopReason.DONE, turns=1, tokens=4, cut=False, error=None, final=()
):
    """Return one trajectory, whose reward is its score by default."""
    texts = [answer] if isinstance(answer, str) else list(answer)
    texts += [texts[-1]] * (turns - len(texts))
    rewards = [0.0] * (len(texts) - 1) + [score if reward is None else reward]
    trajectory = trajectory_of(texts, rewards, stop, final)
    trajectory.score, trajectory.error = score, error
    for turn in trajectory.turns:
        turn.action_ids = [7] * tokens
        turn.finish = FinishReason.LENGTH if cut else FinishReason.STOP
    return trajectory


def groups_of(rows, kind="greedy"):
    """Return one group per item, which is a trajectory or a list of trajectories."""
    groups = []
    for place, found in enumerate(rows):
        trajectories = found if isinstance(found, list) else [found]
        for index, trajectory in enumerate(trajectories):
            trajectory.group_id, trajectory.index = f"eval/{kind}/{place}", index
        groups.append(Group(f"eval/{kind}/{place}", {"id": f"row{place}", "ground_truth": {}}, trajectories))
    return groups


def scored(outcomes, **settings):
    """Return trajectories with these scores; a list of scores is a row with several samples."""
    if isinstance(outcomes, list):
        return [scored(outcome, **settings) for outcome in outcomes]
    return made_episode(score=float(outcomes), **settings)


def rollouts_of(label, greedy, sampled=None):
    groups = {"greedy": groups_of(greedy)}
    if sampled is not None:
        groups["sampled"] = groups_of(sampled, "sampled")
    return ModelRollouts(label, Source("folder", label, label, label), groups)


def measure_format(trajectory, row):
    answer = trajectory.turns[-1].text
    return {"format": float("####" in answer), "field/number": float(bool(re.search("[0-9]", answer)))}


def family_of(measure=measure_format):
    return Family(
        name="made",
        environment=lambda **_: None,
        load=lambda *_, **__: Splits([], []),
        score=lambda trajectory, row: trajectory.score or 0.0,
        measure=measure,
    )


def config_of(**evaluation):
    return Config(name="made", evaluation=EvaluationConfig(**evaluation))
