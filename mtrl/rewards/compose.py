"""Composition of rewards: the reward of a turn is the weighted sum of named components (`reward.components`)."""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

from mtrl.algorithms.registry import unknown
from mtrl.config.schema import RewardConfig
from mtrl.errors import UserError
from mtrl.rewards.component import Component, parse_component
from mtrl.rewards.shaping import SHAPINGS
from mtrl.rewards.user_function import at_last
from mtrl.types import ENVIRONMENT, LARGEST_REWARD, Group, Row, Trajectory
from mtrl.utils.plain_numbers import shown
from mtrl.utils.process_guard import exit_as_error

LEVELS = ("turn", "trajectory")


class RewardComposer:
    """Computes the rewards for training from the environment's rewards and the other components.

    Every component is stored, unweighted, in `Turn.components`, the environment's own reward as `environment`. A second
    application starts from these values, so it gives the same rewards, or those of other weights.
    """

    def __init__(self, config: RewardConfig):
        """Resolve all components.

        Raises:
            UserError: the level is unknown, there are no components, or a component cannot be resolved.
        """
        if config.level not in LEVELS:
            raise UserError(f"reward.level={config.level} is not known; choose one of {', '.join(LEVELS)}")
        if not config.components:
            raise UserError("reward.components is empty; write at least {environment: 1.0}")
        self.level = config.level
        self.components = [parse_component(str(name), spec) for name, spec in config.components.items()]
        self.weights = {component.name: component.weight for component in self.components}
        self.compares = any(component.group_values is not None for component in self.components)
        """Whether a component compares the trajectories of a group, so that they must be rewarded together."""
        self._is_identity = self.level == "turn" and self.weights == {ENVIRONMENT: 1.0}
        self._reported: set[str] = set()
        self._turns = 0

    def of(self, group: Group) -> RewardComposer:
        """Return the composition that applies to a group: this one, or in a mixture that of the group's source."""
        return self

    def apply(self, group: Group) -> None:
        """Set the reward of every turn of the group, in place. In a running event loop, prefer `await
        apply_async(group)`.

        Raises:
            UserError: a reward, a component or the result of a user's function is not a finite number.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            asyncio.run(self.apply_async(group))
        else:  # a running loop cannot be entered again, so a loop in another thread is used
            with ThreadPoolExecutor(1) as pool:
                pool.submit(asyncio.run, self.apply_async(group)).result()

    async def apply_async(self, group: Group) -> None:
        """Like `apply`, but in the running event loop; async functions run concurrently over the trajectories."""
        with_turns = [trajectory.without_summaries() for trajectory in group.trajectories if trajectory.turns]
        for summary in (turn for trajectory in group.trajectories for turn in trajectory.turns if turn.is_summary):
            summary.reward = 0.0
        comparing = [component for component in self.components if component.group_values is not None]
        found: dict[str, list[list[Any]]] = {}
        if with_turns:
            compared = replace(group, row=copy.deepcopy(group.row), trajectories=with_turns)
            values = await asyncio.gather(*(c.group_values(compared) for c in comparing if c.group_values is not None))
            found = {component.name: lists for component, lists in zip(comparing, values, strict=True)}
        each = (
            self._set_rewards(trajectory, group.row, {name: lists[n] for name, lists in found.items()})
            for n, trajectory in enumerate(with_turns)
        )
        await asyncio.gather(*each)

    def check(self) -> None:
        """Check that the environment has reported every component that it should report. Call it after the first step.

        Raises:
            UserError: a component was reported on none of the turns so far, so it is probably misspelt.
        """
        missing = [c.name for c in self.components if c.reported and c.name not in self._reported]
        if missing and self._turns:
            known = sorted({ENVIRONMENT, *self._reported, *SHAPINGS.names()})
            raise UserError(
                f"{unknown('reward.components', missing[0], known)}; the environment reported it on none of "
                f"{self._turns} turns (it should report 0.0 where it does not apply)"
            )

    async def _set_rewards(self, trajectory: Trajectory, row: Row, compared: Mapping[str, list[Any]]) -> None:
        """Set the rewards and components of the T >= 1 turns of a trajectory. `compared` has the T values of each
        component that compares the trajectories of a group."""
        turns = trajectory.turns
        self._turns += len(turns)
        self._reported.update(name for turn in turns for name in turn.components)
        environment = _finite_values(ENVIRONMENT, trajectory.environment_rewards, trajectory)
        if self._is_identity:
            rewards, parts = environment, {}
        else:
            parts = {c.name: await _values(c, trajectory, row, compared.get(c.name)) for c in self.components}
            rewards = [math.fsum(c.weight * parts[c.name][n] for c in self.components) for n in range(len(turns))]
            parts[ENVIRONMENT] = environment
        if self.level == "trajectory":
            rewards = at_last(math.fsum(rewards), len(turns))
        rewards = [_finite(value, f"the sum of reward.components of {_named(trajectory)}") for value in rewards]
        for n, turn in enumerate(turns):
            turn.reward = rewards[n]
            turn.components |= {name: values[n] for name, values in parts.items()}


async def _values(
    component: Component, trajectory: Trajectory, row: Row, given: Sequence[Any] | None = None
) -> list[float]:
    """Return the values of the component on the T turns, as finite floats; they are computed unless they are given."""
    # A function of the user gets a copy of the row, since its changes must not reach later episodes.
    values: Any = given if component.values is None else component.values(trajectory, copy.deepcopy(row))
    if inspect.isawaitable(values):
        values = await values
    return _finite_values(component.name, values, trajectory)


def _finite_values(name: str, values: Sequence[Any], trajectory: Trajectory) -> list[float]:
    """Return the values of the component `name` on the turns of a trajectory as plain floats.

    Raises:
        UserError: a value is no finite number, or too large.
    """
    where = f"reward {name} of {_named(trajectory)}"
    return [_finite(value, f"{where}, turn {n},") for n, value in enumerate(values)]


def _finite(value: Any, where: str) -> float:
    """Return the value as a plain float; `where` is the start of the error message.

    Raises:
        UserError: the value is not a number, not finite, or its magnitude is not below `LARGEST_REWARD`.
    """
    number = math.nan
    if not isinstance(value, str | bytes):
        with suppress(Exception), exit_as_error():  # no number, too large for a float, or an error of its own code
            number = float(value)
    if not abs(number) < LARGEST_REWARD:
        raise UserError(f"{where} is {shown(value)}; a reward must be a finite number below {LARGEST_REWARD:g}")
    return number


def _named(trajectory: Trajectory) -> str:
    return f"trajectory {trajectory.index} of group {trajectory.group_id} (task {trajectory.task_id})"
