"""A session: one episode per row, with rewards and scores as in training."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, TypeVar

from mtrl.config.schema import Config
from mtrl.environments.factory import Task
from mtrl.errors import UserError
from mtrl.play.choices import Choices, find_row, rows_of
from mtrl.play.episode import Rules, TextEpisode, judge
from mtrl.play.keyboard import Keyboard, PlayerCommand
from mtrl.play.players import Moves, gold_moves, moves_of
from mtrl.play.screen import Screen
from mtrl.rewards.mixture import make_composer
from mtrl.scoring.agreement import Thresholds, succeeded
from mtrl.types import EPSILON, Row, Trajectory, write_jsonl
from mtrl.utils.images import content_text

T = TypeVar("T")


class Loop:
    """An event loop on a thread of its own, so that background work of an environment continues while the session waits
    for input, and Ctrl-C reaches the keyboard."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="mtrl-play").start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


@dataclass
class SessionTally:
    """The episodes of a session, and counts of their outcomes."""

    finished: list[Trajectory] = field(default_factory=list)
    failed: int = 0
    unfinished: int = 0
    disagreements: int = 0

    def summary(self, threshold: float) -> str:
        """Return the counts and means in one line."""
        successes = sum(succeeded(t, threshold) for t in self.finished)
        counts = {"failed": self.failed, "left unfinished": self.unfinished, "in disagreement": self.disagreements}
        parts = [f"episodes: {len(self.finished)}"]
        if self.finished:
            parts += [f"mean reward {fmean(t.reward for t in self.finished):.3f}", f"successes {successes}"]
        return ", ".join([*parts, *(f"{name} {count}" for name, count in counts.items() if count)])


class PlaySession:
    """Runs episodes until the player ends the session, or the rows or the number of episodes are exhausted."""

    def __init__(self, config: Config, task: Task, choices: Choices, keyboard: Keyboard, screen: Screen):
        """Prepare the session.

        Raises:
            UserError: the split has no rows, or not the chosen row.
        """
        self.config, self.task, self.choices = config, task, choices
        self.keyboard, self.screen = keyboard, screen
        self.rows = rows_of(task, choices.split)
        self.place = 0 if choices.row is None else find_row(self.rows, choices.row, choices.split)
        self.composer = make_composer(config)
        self.rules = Rules.of(config, task.make_environment)
        self.tally = SessionTally()
        self._loop = Loop()

    def run(self) -> None:
        """Run the episodes, and print a summary at the end, also after an interruption.

        Raises:
            KeyboardInterrupt: the user pressed Ctrl-C; it is raised after the summary.
        """
        try:
            left = self.choices.episodes if self.choices.episodes is not None else math.inf
            while left > 0 and self._play():
                left -= 1
                if self.place >= len(self.rows):
                    self.screen.note(f"these were all rows of {self.choices.split}")
                    break
        finally:
            self.screen.summary(self.tally.summary(self.config.evaluation.success_threshold))
            if self.choices.out is not None:
                self.screen.note(f"trajectories written: {len(self.tally.finished)}, to {self.choices.out}")
            self.rules.pool.close()
            self._loop.stop()

    def _play(self) -> bool:
        """Run one episode on the row at `place`, and advance `place`. Return False if the player has ended the
        session."""
        place, split = self.place, self.choices.split
        row, self.place = self.rows[place], place + 1
        episode = TextEpisode(self.rules, row, f"play/{split}/{place}")
        goes_on = True
        try:
            prompt = self._loop.run(episode.open())
            title = f"row {place} of {split}, id {row['id']}: {self.rules.max_turns} turns at most"
            self.screen.opening(title, prompt, episode.tools)
            if not episode.over:
                moves = moves_of(
                    self.choices.player, self.task.family, row, f"{self.config.seed}/{place}", self.keyboard
                )
                goes_on = self._turns(episode, moves)
        finally:
            is_whole = episode.over
            self._loop.run(episode.close())
            if not is_whole:
                self.tally.unfinished += bool(episode.trajectory.turns)
        if is_whole:
            self._end(episode)
        return goes_on

    def _turns(self, episode: TextEpisode, moves: Moves) -> bool:
        """Take turns until the episode is over or the player leaves it. Return False if the player has ended the
        session."""
        text: str | None = None
        while not episode.over:
            response = moves(text)
            if response is None:
                if self.choices.player != "me":
                    self.screen.warning(f"{self.choices.player} has no further response, and the episode is not over")
                return self.choices.player != "me"
            if isinstance(response, PlayerCommand):
                if response.name == "/quit":
                    return False
                if self._obey(response, episode):
                    return True
                continue
            if not self.keyboard.is_terminal or self.choices.player != "me":
                self.screen.response(response)
            result = self._loop.run(episode.say(response))
            if result is not None:
                self.screen.turn(len(episode.trajectory.turns), self.rules.max_turns, result, episode.observation)
                text = "".join(content_text(message["content"]) for message in episode.observation)
        return True

    def _obey(self, command: PlayerCommand, episode: TextEpisode) -> bool:
        """Execute a command. Return True if it leaves this episode."""
        if command.name == "/help":
            self.screen.help()
        elif command.name == "/gold":
            self._show_gold(episode.row)
        elif command.name == "/row":
            try:
                self.place = find_row(self.rows, command.argument, self.choices.split)
                return True
            except UserError as error:
                self.screen.warning(str(error))
        return command.name == "/skip"

    def _show_gold(self, row: Row) -> None:
        family, rules = self.task.family, self.rules
        if family.gold is None:
            self.screen.warning(f"the family {family.name} has no perfect player")
            return
        try:
            self.screen.gold(self._loop.run(rules.pool.call(gold_moves, family, row, timeout=rules.step_timeout)))
        except Exception as error:
            self.screen.warning(f"the perfect player failed: {type(error).__name__}: {error}")

    def _end(self, episode: TextEpisode) -> None:
        """Compute reward and score of an episode that is over, show them, and save the trajectory."""
        trajectory, thresholds = episode.trajectory, Thresholds.of(self.config.evaluation)
        if not episode.failed:
            self._loop.run(judge(trajectory, episode.row, self.rules, self.composer, self.task.family.score))
        own = math.fsum(trajectory.environment_rewards)
        succeeds = succeeded(trajectory, thresholds.success)
        disagree = not episode.failed and succeeds != (own >= thresholds.claim - EPSILON)
        self.screen.ending(trajectory, own, succeeds, disagree)
        if episode.failed:
            self.tally.failed += 1
            return
        self.tally.disagreements += disagree
        self.tally.finished.append(trajectory)
        if self.choices.out is not None:
            write_jsonl(self.choices.out, [trajectory])
