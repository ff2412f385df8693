"""Tasks of agent programs: rows, and optionally a scorer. The program reports the reward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mtrl.datasets import Splits, load_rows
from mtrl.environments.base import BaseEnvironment, StepResult
from mtrl.environments.family import Family, reward_is_success
from mtrl.errors import UserError
from mtrl.types import Row, Trajectory


class ProgramTask(BaseEnvironment):
    """Placeholder for the environment: an episode of this task needs a program."""

    def step(self, response: str, ground_truth: dict[str, Any]) -> StepResult:
        raise UserError(
            "this task is run by a program; set generator.agent.target, generator.agent.command or generator.agent.url"
        )


def agent_family(
    name: str,
    score: Callable[[Trajectory, Row], float] = reward_is_success,
    load: Callable[..., Splits] = load_rows,
    measure: Callable[[Trajectory, Row], dict[str, float]] | None = None,
    answered: Callable[[Trajectory, Row], bool] | None = None,
) -> Family:
    """A task family for programs; `environment.target=package.module.NAME` points to it.

    Args:
        score: function that judges an episode by its trajectory and row: 1.0 is success. Without it, an episode is a
            success if the program reports a reward of at least 1.
        load: `load(data, seed, **environment.config) -> Splits`; by default the rows of `data.path`.
        measure: function for further values that evaluations report, see `Family.measure`.
        answered: function that tells whether an episode holds a readable answer, see `Family.answered`.

    Example::

        def score(trajectory, row):
            return float(trajectory.messages[-1]["content"].strip() == row["ground_truth"]["answer"])

        FAMILY = agent_family("riddles", score)
    """
    return Family(name=name, environment=ProgramTask, load=load, score=score, measure=measure, answered=answered)


FAMILY = agent_family("agent")
