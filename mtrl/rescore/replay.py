"""The replay of one stored trajectory: comparison of the observations, and the new reward and score."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mtrl.config.schema import Config
from mtrl.environments.factory import Task
from mtrl.play.episode import Rules, TextEpisode, judge_group
from mtrl.record.stored import RowFinder, StoredLine
from mtrl.rewards.compose import RewardComposer
from mtrl.rewards.mixture import make_composer
from mtrl.types import ENVIRONMENT, FAILED, Message, Row, StopReason, Trajectory
from mtrl.utils.text import cut

SHOWN = 60
"""Number of characters to show of each of two observations that differ."""
OPEN_ENDED = (StopReason.CONTEXT_LIMIT, StopReason.ABORTED)
"""Stop reasons that the environment did not cause. Recordings of earlier versions have no last observation there."""


@dataclass(frozen=True)
class Rescored:
    """Reward and score of a trajectory before and after the rescoring."""

    where: str
    kind: str
    task_id: str
    reward_before: float
    reward_after: float
    score_before: float | None
    score_after: float
    rewards_after: list[float]
    """New reward of each turn, length T."""
    last_response: str

    @property
    def changed(self) -> bool:
        return self.reward_before != self.reward_after or self.score_before != self.score_after


@dataclass(frozen=True)
class LeftOut:
    """A trajectory that was not rescored; `why` is unreadable | failed | no row | differs | broke."""

    where: str
    kind: str
    task_id: str | None
    why: str
    message: str


class Rescorer:
    """Rescores stored trajectories with a configuration."""

    def __init__(self, config: Config, task: Task):
        self.task = task
        self.composer = make_composer(config)
        self.rules = Rules.of(config, task.make_environment)
        self.rows = RowFinder(task.splits)
        self.replays = needs_environment(self.composer)
        """Whether the responses are replayed in the environment."""
        self.workers = config.environment.max_workers

    async def rescore(self, stored: Sequence[StoredLine]) -> list[Rescored | LeftOut]:
        """Rescore trajectories of one group: together if a component compares them, else each alone. An error of a
        line, an environment or a reward is returned as `LeftOut` and not raised."""
        replayed = await asyncio.gather(*map(self._replayed, stored))
        ready = [(after, row) for _, after, row in replayed if after is not None]
        groups = [ready] if self.composer.compares and ready else [[one] for one in ready]
        for group in groups:
            trajectories, (_, row) = [after for after, _ in group], group[0]
            await judge_group(trajectories, row, self.rules, self.composer, self.task.family.score)
        return [
            self._rescored(line, after) if left_out is None else left_out
            for line, (left_out, after, _) in zip(stored, replayed, strict=True)
        ]

    async def _replayed(self, stored: StoredLine) -> tuple[LeftOut, None, None] | tuple[None, Trajectory, Row]:
        """Return a copy of the trajectory for new rewards, and its row; or why it is left out."""
        before = stored.trajectory
        if before is None:
            return LeftOut(stored.where, stored.kind, None, "unreadable", stored.problem), None, None

        def left_out(why: str, message: str) -> tuple[LeftOut, None, None]:
            return LeftOut(stored.where, stored.kind, before.task_id, why, message), None, None

        if before.stop_reason in FAILED or not before.turns:
            first = (before.error or "").partition("\n")[0]
            return left_out("failed", first or f"it ended with {before.stop_reason}, without a turn")
        try:
            row = self.rows.find(stored, before)
        except KeyError as error:
            return left_out("no row", str(error.args[0]))
        episode = TextEpisode(self.rules, row, before.group_id, before.index)
        if self.replays:
            differs = await replay(episode, before)
            if episode.failed:
                return left_out("broke", (episode.trajectory.error or "").partition("\n")[0])
            if differs:
                return left_out("differs", differs)
        return None, rewarded_again(before, episode.trajectory if self.replays else None), row

    def _rescored(self, stored: StoredLine, after: Trajectory) -> Rescored | LeftOut:
        before = stored.trajectory
        assert before is not None
        if after.error:
            message = after.error.partition("\n")[0]
            return LeftOut(stored.where, stored.kind, before.task_id, "broke", message)
        return Rescored(
            stored.where, stored.kind, before.task_id, before.reward, after.reward, before.score, after.score or 0.0,
            after.rewards, before.turns[-1].text,
        )  # fmt: skip


def needs_environment(composer: RewardComposer) -> bool:
    """Whether the reward depends on the environment; components that are functions of the messages do not need a
    replay."""
    return any(c.weight and (c.reported or c.name == ENVIRONMENT) for c in composer.components)


async def replay(episode: TextEpisode, before: Trajectory) -> str | None:
    """Replay the responses. Return the first difference to the recording in one sentence; None if there is no
    difference."""
    where = f"row {before.task_id}, turn"
    try:
        observation = await episode.open()
        for number, turn in enumerate(before.environment_turns, 1):
            if episode.failed:
                return None
            if episode.over:
                return f"{where} {number - 1}: the environment ends the episode, and the recording continues"
            if observation != turn.observation:
                what = "prompt" if number == 1 else "observation"
                return f"{where} {number}: another {what}: {_both(turn.observation, observation)}"
            await episode.say(turn.text, turn.message)
            observation = episode.observation
        if before.stop_reason == StopReason.CONTEXT_LIMIT and not episode.over:
            await episode.truncate()
        return None if episode.failed else _end_differs(episode, before, f"{where} {len(before.environment_turns)}")
    finally:
        await episode.close()


def _end_differs(episode: TextEpisode, before: Trajectory, where: str) -> str | None:
    ended = before.stop_reason == StopReason.DONE
    ends = episode.over and episode.trajectory.stop_reason == StopReason.DONE
    if ended and not ends:
        return f"{where}: the recording ends here, and the environment continues"
    if ends and not ended:
        return f"{where}: the environment ends here, and the recording continues ({before.stop_reason})"
    is_recorded = bool(before.final_observation) or before.stop_reason not in OPEN_ENDED
    if is_recorded and episode.observation != before.final_observation:
        return f"{where}: another last observation: {_both(before.final_observation, episode.observation)}"
    return None


def _both(was: list[Message], is_now: list[Message]) -> str:
    """Return excerpts of the recorded and the new observation around their first difference."""
    old, new = (" ".join(str(m.get("content")) for m in messages) for messages in (was, is_now))
    if old == new:
        return "the same text in other messages"
    same = next(
        (n for n, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), min(len(old), len(new))
    )
    start = max(0, same - SHOWN // 2)
    old, new = (cut(text[start:], SHOWN, 1).replace("\n", " ") for text in (old, new))
    return f"was {old!r}, is {new!r}"


def rewarded_again(before: Trajectory, replayed: Trajectory | None) -> Trajectory:
    """Return a copy of the recording with the rewards of the replay, or with the recorded rewards if there was no
    replay."""
    turns = [replace(turn, components=dict(turn.components)) for turn in before.turns]
    received = (turn for turn in turns if not turn.is_summary)
    for turn, now in zip(received, replayed.turns if replayed else (), strict=False):
        turn.reward, turn.components, turn.metrics = now.reward, now.components, now.metrics
    return replace(before, turns=turns, metrics=dict(before.metrics), score=None, answered=None, error=None)
