"""One episode of a game."""

from __future__ import annotations

from typing import Any, ClassVar

from envs.games import prompts
from envs.games.mastermind import Mastermind
from envs.games.maze import LONGEST, Maze
from envs.games.outcome import Outcome
from envs.games.reward import SCHEMES, EpisodeReward
from mtrl.environments.base import BaseEnvironment, StepResult
from mtrl.errors import UserError
from mtrl.types import Message, Row

GAMES: dict[str, type[Mastermind] | type[Maze]] = {"mastermind": Mastermind, "maze": Maze}
OPEN, CLOSE = "<move>", "</move>"
LONGEST_MOVE = 64
"""Maximum length of a move, in characters."""


def make_game(truth: dict[str, Any]) -> Mastermind | Maze:
    """Return the game of a row's `ground_truth`.

    Raises:
        UserError: the game is unknown, or the row does not describe a game.
    """
    game = GAMES.get(str(truth.get("game")))
    if game is None:
        raise UserError(f"ground_truth.game={truth.get('game')!r} is not known; choose one of {', '.join(GAMES)}")
    return game.from_truth(truth)


def parse_move(response: str) -> str | None:
    """Return the content of the only `<move>…</move>` of a response, without its thinking; None if there is not exactly
    one."""
    visible = response.rpartition("</think>")[2]
    if visible.count(OPEN) != 1 or visible.count(CLOSE) != 1:
        return None
    move, closed, _ = visible.partition(OPEN)[2].partition(CLOSE)
    return move if closed and len(move) <= LONGEST_MOVE else None


class GamesEnv(BaseEnvironment):
    """In each turn the model makes one move and observes its result, until the game is solved or the turns run out.

    A response without a valid move uses up its turn, and always gets the same observation.
    """

    reward_schemes: ClassVar[tuple[str, ...]] = SCHEMES

    def __init__(self, max_turns: int = 6, reward: str = "default", steps: int = LONGEST, **config: Any):
        super().__init__(max_turns)  # the other keys of environment.config are for the loader
        if max_turns < 1:
            raise UserError(f"generator.max_turns={max_turns} leaves no turn to move; set it to 1 or more")
        if config.get("game") != "mastermind" and steps > max_turns:
            raise UserError(
                f"environment.config.steps={steps} asks for mazes that generator.max_turns={max_turns} cannot solve; "
                "raise max_turns to half as many again, or lower steps"
            )
        self.scheme = reward
        self.reset()

    def reset(self, row: Row | None = None) -> list[Message] | None:
        super().reset(row)
        self.reward = EpisodeReward(self.scheme)
        self.game: Mastermind | Maze | None = None
        return None

    def step(self, response: str, ground_truth: dict[str, Any]) -> StepResult:
        self.current_turn += 1
        if self.game is None:
            self.game = make_game(ground_truth)
        move = parse_move(response)
        outcome = None if move is None else self.game.play(move)
        return self._result(outcome or Outcome(prompts.MALFORMED, 0.0), malformed=float(outcome is None))

    def _result(self, outcome: Outcome, **metrics: float) -> StepResult:
        turns_left = self.max_turns - self.current_turn
        done = outcome.solved or turns_left <= 0
        components = self.reward.components(outcome.progress, outcome.solved, done)
        return StepResult(
            reward=sum(components.values()),
            observation=None if done else prompts.observation(outcome.observation, turns_left),
            done=done,
            truncated=done and not outcome.solved,
            components=components,
            metrics=metrics,
        )
