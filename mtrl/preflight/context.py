"""The input of every check: the configuration, the task, a stage for scripted episodes, and the gold episodes."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

from mtrl.config.schema import Config
from mtrl.datasets import Splits
from mtrl.environments.base import BaseEnvironment
from mtrl.environments.factory import environment_factory, offline_config
from mtrl.environments.family import Family
from mtrl.environments.players import PlayerError, demonstrator_moves, gold_responses
from mtrl.errors import UserError
from mtrl.preflight.repeats import Action, Repeats
from mtrl.preflight.responses import FUZZ, final_answers, nonsense
from mtrl.preflight.stage import Moves, Script, ScriptedEpisode, Stage, scripted
from mtrl.rewards.compose import RewardComposer
from mtrl.scoring.agreement import Thresholds
from mtrl.types import ENVIRONMENT, EPSILON, Row
from mtrl.utils.process import usable_cores

T = TypeVar("T")

TOOL_RESPONSES = 4
"""Maximum number of different tool calls that checks repeat."""
REPEATED = 12
"""Number of gold episodes, and of demonstrator episodes, that are repeated in addition to the fuzz."""
BASELINES = 100
"""Default maximum number of demonstrator episodes."""
METHODS = {
    "gold": "a method gold(row) that returns the responses of a perfect player",
    "demonstrate": "a method demonstrate(row, rng) that returns a player who sometimes succeeds",
    "worked_example": "a method worked_example(row) that returns the row that the prompt's example solves",
    "decoys": "a method decoys(row) that returns wrong final responses",
}
"""Optional methods of a task that only the pre-flight uses, each with the description that messages show."""
DECOYS = 3
"""Maximum number of wrong answers to keep per row."""
SEARCHED_ROWS = 12
"""Maximum number of rows on which exploits are searched for: each row is run in dozens of ways."""


class lazy(Generic[T]):  # named like `property`, since it is used like it
    """An attribute that is computed at its first use and then cached: `functools.cached_property` without its lock.

    Up to Python 3.11 all instances of a class share that lock: a value whose computation never ends, as with a task
    that hangs, would block every other checklist of the process.
    """

    def __init__(self, make: Callable[[Any], T]):
        self._make = make
        self.__doc__ = make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        value: T = self._make(instance)
        instance.__dict__[self._name] = value  # later reads find it here first
        return value


@dataclass
class CheckContext:
    """The input of every check. Each lazy value is computed once, when the first check reads it."""

    config: Config
    family: Family
    splits: Splits
    make_environment: Callable[[], BaseEnvironment]
    max_rows: int
    seconds: float
    """Time limit of each batch of episodes, in seconds."""
    patience: float = 0.0
    """Additional seconds for episodes that are in progress when `seconds` have passed."""
    deadline: float = math.inf
    """Time of the monotonic clock, in seconds, after which no episode starts."""
    baselines: int = BASELINES
    """Maximum number of demonstrator episodes."""
    processes: int = 0
    """Number of fresh processes that repeat episodes; with 0, this process produces the reference episodes."""
    replaced: dict[str, Any] = field(default_factory=dict, init=False)
    """The settings in `environment.config` that make requests to a server and that the checks have replaced, see
    `Family.offline`; empty if the task makes no such requests."""
    made: dict[Callable[[CheckContext], Any], Any] = field(default_factory=dict, init=False)
    """Results of `once`, by function."""

    reported: dict[str, str] = field(default_factory=dict, init=False)
    """Error of a player -> name of the check that has reported it."""

    def __post_init__(self) -> None:
        """Replace the settings of a task that makes requests to a server by its offline settings."""
        if (offline := offline_config(self.config, self.family)) is not None:
            settings, kept = self.config.environment.config, offline.environment.config
            self.replaced = {str(key): value for key, value in settings.items() if kept.get(key) != value}
            self.config, self.make_environment = offline, environment_factory(offline, self.family)

    def once(self, make: Callable[[CheckContext], T]) -> T:
        """Return `make(self)`, which is computed at the first call with this function."""
        if make not in self.made:
            self.made[make] = make(self)
        result: T = self.made[make]
        return result

    @lazy
    def stage(self) -> Stage:
        environment = self.config.environment
        return Stage(
            self.make_environment,
            self.family.score,
            RewardComposer(self.config.reward),
            self.config.generator.max_turns,
            environment.step_timeout,
            environment.episode_timeout,
            self.seconds,
            self.patience,
            self.deadline,
            workers=usable_cores() if self.family.waits_for_processes else 1,
        )

    def stage_with(self, max_turns: int) -> Stage:
        """Return a stage that differs only in `generator.max_turns`."""
        make = environment_factory(self.config, self.family, max_turns)
        return replace(self.stage, make_environment=make, max_turns=max_turns)

    # -- rows --------------------------------------------------------------------------------------------------------

    @lazy
    def places(self) -> list[tuple[str, int]]:
        """Split and index of the rows on which episodes run: from both splits, spread evenly."""
        test = min(len(self.splits.test), self.max_rows // 2)
        train = min(len(self.splits.train), self.max_rows - test)
        spread = [("train", _spread(len(self.splits.train), train)), ("test", _spread(len(self.splits.test), test))]
        return [(split, index) for split, indices in spread for index in indices]

    @lazy
    def rows(self) -> list[Row]:
        return [getattr(self.splits, split)[index] for split, index in self.places]

    @property
    def all_rows(self) -> list[Row]:
        """Rows of all splits."""
        return [*self.splits.train, *self.splits.validation, *self.splits.test]

    # -- players -----------------------------------------------------------------------------------------------------

    @lazy
    def gold(self) -> list[ScriptedEpisode]:
        """Gold episodes on the selected rows for which gold has responses; empty without `Family.gold`."""
        return self.stage.run(Script(row, scripted(responses), "gold") for row, responses in self.gold_responses)

    @lazy
    def gold_responses(self) -> list[tuple[Row, Sequence[str]]]:
        """Gold responses for the selected rows."""
        return [] if self.family.gold is None else list(_known(partial(gold_responses, self.family), self.rows))

    @lazy
    def gold_elsewhere(self) -> list[ScriptedEpisode]:
        """Gold episodes on the other rows of all splits, within the time limit; empty if the context has a deadline."""
        if self.family.gold is None or math.isfinite(self.deadline):
            return []
        selected = {id(row) for row in self.rows}
        others = [row for row in self.all_rows if id(row) not in selected]
        return self.stage.run(
            Script(row, scripted(responses), "gold")
            for row, responses in _known(partial(gold_responses, self.family), others)
        )

    @lazy
    def unplayable(self) -> set[str]:
        """Ids of the rows on which gold has an error; such a row is broken for every player."""
        return {self.key(episode) for episode in (*self.gold, *self.gold_elsewhere) if episode.error}

    @lazy
    def solved(self) -> list[ScriptedEpisode]:
        """Gold episodes without error that the scorer counts as success, on the rows on which exploits are tried."""
        good = [episode for episode in self.gold if self.succeeds(episode) and not episode.error]
        return [good[index] for index in _spread(len(good), min(len(good), SEARCHED_ROWS))]

    @lazy
    def demonstrated(self) -> list[ScriptedEpisode]:
        """Demonstrator episodes on training rows; empty without `Family.demonstrate`."""
        if self.family.demonstrate is None:
            return []

        def player(row: Row, seed: str | int) -> Moves:
            return demonstrator_moves(self.family, row, random.Random(seed))

        selected = [row for row, (split, _) in zip(self.rows, self.places, strict=True) if split == "train"]
        seen = {id(row) for row in selected}
        more = (self.splits.train[i] for i in _spread(len(self.splits.train), min(len(self.splits.train), BASELINES)))
        wanted = [*selected, *(row for row in more if id(row) not in seen)][: self.baselines]
        rows = [row for row, _ in _known(lambda row: player(row, 0), wanted)]
        scripts = [
            Script(row, partial(player, row, f"{self.config.seed}/{n}"), "demonstrator") for n, row in enumerate(rows)
        ]
        return self.stage.run(scripts)

    @lazy
    def fuzz(self) -> list[ScriptedEpisode]:
        """Episodes of unexpected responses (`FUZZ`), on the first selected rows on which gold has no error."""
        broken = {self.key(episode) for episode in self.gold if episode.error}
        rows = ([row for row in self.rows if str(row["id"]) not in broken] or self.rows)[: len(FUZZ)]
        scripts = [
            Script(rows[n % len(rows)], scripted([], then=text), f"fuzz {text[:30]!r}") for n, text in enumerate(FUZZ)
        ]
        return self.stage.run(scripts)

    @lazy
    def guessed(self) -> list[ScriptedEpisode]:
        """Gold episodes whose last response is replaced by another one in its form, which is the label."""
        return self.stage.run(
            Script(episode.row, scripted([*episode.responses[:-1], text]), text)
            for episode in self.solved
            for text in self._candidates(episode)
        )

    @lazy
    def wrong(self) -> dict[str, list[str]]:
        """Final responses by row id: well formed as gold's, but rejected by the scorer on this row."""
        found: dict[str, list[str]] = {}
        for tried in self.guessed:
            if not self.succeeds(tried):
                found.setdefault(self.key(tried), []).append(tried.label)
        return {key: texts[:DECOYS] for key, texts in found.items()}

    def _candidates(self, episode: ScriptedEpisode) -> list[str]:
        """Return the family's own decoys, or else the answers of other rows; then nonsense in gold's form."""
        final = episode.responses[-1]
        if self.family.decoys is not None:
            others: Iterable[str] = self.family.decoys(episode.row)
        else:
            others = final_answers(final, (other.responses[-1] for other in self.solved if other is not episode))
        unique = dict.fromkeys([*list(others)[: 2 * DECOYS], *nonsense(final)])
        return [text for text in unique if text != final]

    @lazy
    def tool_responses(self) -> list[str]:
        """Responses of gold and the demonstrator that are not the last of their episode: tool calls and moves."""
        episodes = [*self.solved, *self.demonstrated]
        return list(dict.fromkeys(text for e in episodes for text in e.responses[:-1]))[:TOOL_RESPONSES]

    def wrong_answers(self, row: Row) -> list[str]:
        """Return well-formed answers that are wrong on the row: a known wrong answer, if any, and nonsense. Without
        gold for this row they are those of the first gold episode."""
        if not self.gold:
            return []
        episode = next((episode for episode in self.gold if episode.row is row), self.gold[0])
        if not episode.responses:
            return []
        return [*self.wrong.get(self.key(episode), [])[:1], *nonsense(episode.responses[-1])[:1]]

    @lazy
    def repeats(self) -> Repeats:
        """The responses of gold, of the demonstrator and of the fuzz, to be repeated."""
        place = {id(row): where for row, where in zip(self.rows, self.places, strict=True)}
        episodes = [*self.gold[:REPEATED], *[e for e in self.demonstrated if id(e.row) in place][:REPEATED], *self.fuzz]
        actions = [Action(place[id(e.row)], e.row, e.responses, e.label) for e in episodes]
        return Repeats(self.config, actions, self.processes, self.seconds, self.stage)

    # -- verdicts ----------------------------------------------------------------------------------------------------

    def succeeds(self, episode: ScriptedEpisode) -> bool:
        """Whether the scorer counts the episode as a success."""
        return episode.score >= self.config.evaluation.success_threshold - EPSILON

    def claims(self, episode: ScriptedEpisode) -> bool:
        """Whether the reward counts the episode as solved."""
        return self.claimed_reward(episode) >= Thresholds.of(self.config.evaluation).claim - EPSILON

    def claimed_reward(self, episode: ScriptedEpisode) -> float:
        """Return the reward that decides whether the reward counts the episode as solved: that of training if
        `evaluation.claim_threshold` gives its scale, or if the environment's own reward is no part of it; else the
        environment's own reward, since a penalty beside it does not make a solved episode an unsolved one."""
        is_own = self.config.evaluation.claim_threshold is None and self.stage.composer.weights.get(ENVIRONMENT)
        return episode.environment_reward if is_own else episode.reward

    def key(self, episode: ScriptedEpisode) -> str:
        return str(episode.row["id"])

    def needs_gold(self) -> str | None:
        """Return why checks that start from a solved episode cannot run; None if they can."""
        if self.family.gold is None:
            return lacks(self.family, "gold")
        if not self.gold_responses:
            return f"`gold` of the family {self.family.name} has no right answer to these rows{self._refusal()}"
        if not self.gold:
            return f"no gold episode ended within {self.seconds:g} s"
        return None if self.solved else "no gold answer is a success; see the check gold"

    def _refusal(self) -> str:
        """Return `: ` and the error with which gold rejects the first row; an empty text if gold accepts the row."""
        assert self.family.gold is not None
        try:
            self.family.gold(self.rows[0])
        except UserError as error:
            return f": {error}"
        return ""


def lacks(family: Family, *methods: str) -> str:
    """Return why a check that needs all of these `METHODS` cannot run, and how to enable it. The text names the missing
    methods, or all of them if none is missing (they then have no result for any row)."""
    missing = [method for method in methods if getattr(family, method) is None] or methods
    has_no = " and no ".join(f"`{method}`" for method in missing)
    methods_text = " and ".join(METHODS[method] for method in missing)
    return f"{family.name} has no {has_no}; {methods_text} enable{'s' * (len(missing) == 1)} this check"


def _known(player: Callable[[Row], T], rows: Iterable[Row]) -> Iterator[tuple[Row, T]]:
    """Yield each row with the result of `player`; a row that it rejects with `UserError` is left out.

    Raises:
        PlayerError: the player failed on a row.
    """
    for row in rows:
        try:
            yield row, player(row)
        except PlayerError:
            raise
        except UserError:
            continue


def _spread(length: int, count: int) -> list[int]:
    """Return `count` indices of a list, evenly spread, the first index included."""
    return [index * length // count for index in range(count)] if count else []


def at_most(texts: Sequence[str], count: int = 3) -> str:
    """Join the first `count` findings, and append the number of the others."""
    more = f" (and {len(texts) - count} more)" if len(texts) > count else ""
    return "; ".join(texts[:count]) + more


def fingerprint(value: Any) -> str:
    """Return a text that is the same for equal rows, prompts or ground truths."""
    return json.dumps(value, sort_keys=True, default=str)
