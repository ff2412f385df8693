"""Self-play: episodes in which the policy takes several roles, or meets a frozen policy.

The two sides of a game are two tasks with one environment. Each role therefore has its own conversation and gives its
own trajectory, with only its own tokens, rewards and observations; the moves of other roles are text in its
observations. So everything that reads trajectories - samples and their masks, merging of turns, scorers, staleness,
records - needs to know nothing of roles. The trajectories of all trained roles are one group, and `Group.by_role`
separates them wherever rewards are compared.

Without frozen weights the current policy takes all roles, and all of them are trained. With frozen weights the role of
the row is trained, and the turns of the frozen roles are discarded. Only training rows, which have the key `SELF_PLAY`,
are run so; all others, as in evaluations, are run against the environment's fixed opponent.

A turn of a role lasts until the role moves again: its reward and observation contain the answers of the other roles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from mtrl.engines.base import SamplingParams, TurnSampler
from mtrl.engines.local.frozen import FrozenEngine
from mtrl.environments.base import BaseEnvironment, StepResult
from mtrl.environments.factory import close_now
from mtrl.environments.results import as_messages
from mtrl.environments.roles import SELF_PLAY, RoleEnvironment, role_of
from mtrl.rollout.conversation import Dialogue
from mtrl.rollout.episode import EpisodeLoop
from mtrl.rollout.stepper import Stepper, TimedCall
from mtrl.types import Row, StopReason, Trajectory, Turn


class Side(Stepper):
    """One role of an episode: applies its turns to the environment that all roles share, which the caller closes.

    `act` applies a turn, and `take` sets its reward and returns its observation once the role moves again, or the
    episode is over.
    """

    def __init__(
        self, environment: RoleEnvironment, role: str, call: TimedCall, trajectory: Trajectory, row: Row, max_turns: int
    ):
        super().__init__(_made_already, call, trajectory, row, max_turns)
        self.environment: RoleEnvironment = environment
        self.role = role
        self.conversation: Dialogue
        self.waiting: Turn | None = None
        """The turn that was applied and has no result yet."""

    async def sit(self, make_conversation: Callable[..., Dialogue]) -> None:
        """Begin the conversation, when the role moves for the first time."""
        self.conversation = make_conversation(as_messages(await self.call(self.environment.opening, self.role)))
        self.trajectory.turns = self.conversation.turns

    async def act(self, turn: Turn) -> None:
        """Apply a turn of this role."""
        self.waiting, self.trajectory.final_observation = turn, []
        await self.call(self.environment.act, self.role, turn.text)

    async def settle(self) -> None:
        """Take the result of the turn that waits for it, if there is one."""
        turn, self.waiting = self.waiting, None
        if turn is None:
            return
        _, observation = await self.take(turn)
        if not self.over:
            self.conversation.add_observation(observation)

    async def end(self, reason: StopReason) -> None:
        """End the role's part of an episode that is over, or that ends now for this reason."""
        await self.settle()
        if self.over:
            return
        self.trajectory.stop_reason = reason
        self.trajectory.trainable &= reason != StopReason.ABORTED and bool(self.trajectory.turns)
        if self.trajectory.turns and reason != StopReason.ABORTED:
            await self.truncate()

    async def _step(self, turn: Turn) -> Any:
        result = await self.call(self.environment.result, self.role)
        name, mover = f"{type(self.environment).__name__}.result({self.role!r})", self.environment.mover
        if not isinstance(result, StepResult):
            raise TypeError(f"{name} returned {result!r:.200}; it must return a StepResult")
        if bool(result.done) != (mover is None):
            raise ValueError(
                f"{name} returned done={result.done} while the role that moves next is {mover}; done must be true "
                "exactly where mover is None"
            )
        return result


@dataclass
class SelfPlayLoop(EpisodeLoop):
    """Loop of episodes with several roles; see above."""

    roles: tuple[str, ...] = field(kw_only=True)
    """Names of the environment's roles."""
    frozen: FrozenEngine | None = field(kw_only=True, default=None)
    """Engine of the roles that are not the row's; None: the policy takes all roles."""

    async def close(self) -> None:
        """See `Episodes.close`; the frozen engine ends too."""
        await super().close()
        if self.frozen is not None:
            await self.frozen.close()

    async def run_roles(self, row: Row, group_id: str, index: int, sampling: SamplingParams) -> list[Trajectory]:
        """See `Episodes.run_roles`. A role that never moved gets a trajectory without turns, which is not trained."""
        if SELF_PLAY not in row:
            return await super().run_roles(row, group_id, index, sampling)
        trained = self.roles if self.frozen is None else (role_of(row, self.roles),)
        empty = [
            Trajectory(str(row["id"]), group_id, index * len(trained) + place, role=role)
            for place, role in enumerate(trained)
        ]
        return await self._attempts(empty, row, f"{group_id}/{index}", sampling)

    async def _run_trajectories(
        self, trajectories: list[Trajectory], handle: str, row: Row, sampling: SamplingParams
    ) -> None:
        if SELF_PLAY not in row:
            return await super()._run_trajectories(trajectories, handle, row, sampling)
        environment: Any = await self._call(self.make_environment, discard=close_now)
        try:
            await self._call(environment.deal, row)
            await self._play(environment, {str(t.role): t for t in trajectories}, handle, row, sampling)
        finally:
            await self.pool.finish(environment.close, timeout=self.limits.step_timeout)

    async def _play(
        self,
        environment: RoleEnvironment,
        trained: dict[str, Trajectory],
        trajectory_id: str,
        row: Row,
        sampling: SamplingParams,
    ) -> None:
        """Let the roles move until the episode is over for one of them, which ends it for all."""
        sides = {
            role: Side(
                environment,
                role,
                self._call,
                trained.get(role) or Trajectory(str(row["id"]), "", 0, role=role),
                row,
                self.limits.max_turns,
            )
            for role in self.roles
        }
        turns, reason = 0, StopReason.DONE
        while (role := environment.mover) is not None:
            if role not in sides:
                known = ", ".join(self.roles)
                raise ValueError(f"{type(environment).__name__}.mover is {role!r}; it must be None or one of {known}")
            engine: Any = self.engine if role in trained else self.frozen
            # Every turn has its own random stream, as in an episode with one role.
            own = replace(sampling, seed=(sampling.seed + turns) % 2**64)
            if not await self._move(sides[role], engine, trajectory_id, own):
                reason = sides[role].trajectory.stop_reason
                break
            turns += 1
        for side in sides.values():
            await side.end(reason)

    async def _move(self, side: Side, engine: TurnSampler, trajectory_id: str, sampling: SamplingParams) -> bool:
        """Let a role move; return False if the episode is over for it instead."""
        if not side.trajectory.turns:
            await side.sit(self.make_conversation)
        await side.settle()
        if side.over:
            return False
        turn = await self._sample(engine, side, trajectory_id, side.conversation, sampling)
        if turn is not None:
            await side.act(turn)
        return turn is not None

    async def _call(self, function: Callable[..., Any], *args: Any, discard: Callable[[Any], Any] | None = None) -> Any:
        return await self.pool.call(function, *args, timeout=self.limits.step_timeout, discard=discard)


def _made_already() -> BaseEnvironment:
    raise RuntimeError("the roles of an episode share one environment")
