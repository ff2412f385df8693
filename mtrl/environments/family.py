"""A task family: everything that a run needs to know about a task, under one name."""

from __future__ import annotations

import importlib
import inspect
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mtrl.datasets import Splits
from mtrl.environments.adapters import adapt, extra_hint
from mtrl.environments.base import BaseEnvironment
from mtrl.errors import UserError
from mtrl.types import EPSILON, Row, Trajectory
from mtrl.utils.user_code import reason

NOT_ASYNC = ("score", "demonstrate", "gold", "decoys", "answered", "worked_example", "explain", "measure", "offline")
"""Functions of a family that are called without an event loop."""
OF_ROWS = ("load", *NOT_ASYNC)
"""Functions of a family that a class of environments may have as static methods: they are called without an episode."""


class Demonstrator(Protocol):
    """A weak policy for one episode, whose demonstrations warm-start the built-in tiny policy."""

    def act(self, observation: str | None) -> str:
        """Return the next response; `observation` is the environment's last text, None before the first action."""


class Recital:
    """A demonstrator that returns these responses in order, whatever it observes, and then repeats the last one."""

    def __init__(self, responses: Sequence[str]):
        self.responses = list(responses)
        self._next = 0

    def act(self, observation: str | None) -> str:
        """Return the next response."""
        response = self.responses[min(self._next, len(self.responses) - 1)]
        self._next += 1
        return response


@dataclass(frozen=True)
class Family:
    """One task family of `envs/`, or one of the user's own."""

    name: str
    environment: Callable[..., BaseEnvironment]
    """Class or factory of the environment; called with `max_turns`, `reward` and the keys of `environment.config`."""
    load: Callable[..., Splits]
    """`load(data, seed, **environment.config) -> Splits`, where `data` is the `data` section of the config. A loader
    with a parameter `prompt` also gets the kind of the prompts to write, short or full (see `environment.prompt`)."""
    score: Callable[[Trajectory, Row], float]
    """Independent scorer: 1.0 is success. It shares no parsing code with the environment or its reward."""
    demonstrate: Callable[[Row, random.Random], Demonstrator] | None = None
    gold: Callable[[Row], Sequence[str]] | None = None
    """Function that returns the responses of a perfect policy, which must score 1 by environment, reward and scorer."""
    decoys: Callable[[Row], Sequence[str]] | None = None
    """Function that returns wrong final responses that look right, for the pre-flight. Without it the pre-flight uses
    answers of other rows."""
    answered: Callable[[Trajectory, Row], bool] | None = None
    """Function that tells whether the policy gave an answer that the task can read, right or wrong; `completion` counts
    such episodes. Without it, an episode counts if the environment ended it after a turn that no limit cut. Like
    `score` it shares no parsing code with the environment or its reward."""
    worked_example: Callable[[Row], Row | None] | None = None
    """Function that returns the row that the worked example in a row's full prompt solves, on which the pre-flight runs
    the example (see mtrl/environments/worked_example.py); None if the example cannot run with these settings."""
    explain: Callable[[Trajectory, Row], str | None] | None = None
    """Function that returns why a trajectory is no success by `score`, or None for a success. The pre-flight shows the
    reason for gold responses that fail."""
    measure: Callable[[Trajectory, Row], dict[str, float]] | None = None
    """Function that returns further values for evaluations, each in [0, 1]: `format` (the answer has the required
    form), `field/<name>` (one field of the answer is right), or any other name. A key that does not fit a row is left
    out. Like `score` it shares no parsing code with the environment or its reward."""
    offline: Callable[[Mapping[str, Any]], dict[str, Any] | None] | None = None
    """Function from `environment.config` to the same settings without requests to a server whose answers vary, such as
    a model that plays a customer; None if the settings make no such requests. With such requests the same actions give
    other observations each time: the pre-flight says so, and runs its episodes with the offline settings."""
    config_keys: tuple[str, ...] = ()
    """Keys that `environment.config` may hold."""
    waits_for_processes: bool = False
    """Whether the environment and `score` mostly wait for their own processes, for example a sandbox's, and may be
    called in several threads at once. Episodes are then scored concurrently, and the pre-flight runs them so."""
    tokens: tuple[str, ...] = field(default=())
    """Tags such as `<sql>` that are single tokens of the tiny policy's tokenizer."""
    shows_images: bool = False
    """Whether messages hold images (`mtrl.utils.images.image_part`), which only some models read."""

    def __post_init__(self) -> None:
        """Check that the functions of the family are not async.

        Raises:
            UserError: one of them is; only the methods of an environment may be.
        """
        for name in NOT_ASYNC:
            if inspect.iscoroutinefunction(getattr(self, name)):
                raise UserError(
                    f"{name} of {self.name} is async; write `def {name}`, only methods of an episode may be"
                )

    @property
    def has_scorer(self) -> bool:
        """Whether a scorer other than the reward judges success."""
        return self.score is not reward_is_success


BUILT_IN = {
    name: f"envs.{name}"
    for name in (
        "gsm8k",
        "text_to_sql",
        "games",
        "search",
        "triviaqa",
        "mini_swe",
        "sop",
        "service",
        "tic_tac_toe",
        "visual_maze",
    )
}
"""Family name -> module that holds its `FAMILY`."""

PLACE = "write package.module.Name, of the folder where you start or installed"

REGISTERED: dict[str, Family] = {}
"""Families that `register` added, by name."""


def register(family: Family) -> Family:
    """Register a family that is defined outside of this repository under its name."""
    REGISTERED[family.name] = family
    return family


def get_family(name: str, target: str | None = None) -> Family:
    """Return the family called `name`, or the one that `target` (`package.module.NAME`) points to.

    Raises:
        UserError: the family does not exist, or the target cannot be imported or made into a `Family`.
    """
    if target:
        return _from_target(target)
    if name in REGISTERED:
        return REGISTERED[name]
    if name not in BUILT_IN:
        known = ", ".join(sorted({*BUILT_IN, *REGISTERED}))
        raise UserError(f"environment.name={name} is not known; choose one of {known}, or set environment.target")
    return importlib.import_module(BUILT_IN[name]).FAMILY


def _from_target(target: str) -> Family:
    from mtrl.utils.process_guard import import_guarded  # imports asyncio, which --help does not need

    module, _, attribute = target.rpartition(".")
    if not module:
        raise UserError(f"environment.target={target} names no class; write module.Class, such as vault.Vault")
    try:
        value: Any = getattr(import_guarded(module), attribute)
    except UserError:  # its message names the cause and the fix already
        raise
    except Exception as error:  # the module is the user's: importing it can fail in any way
        expected = isinstance(error, ImportError | AttributeError | ValueError)
        fix = extra_hint(error) or (PLACE if expected else "fix the module")
        problem = error if expected else reason(error)
        raise UserError(f"environment.target={target} cannot be imported ({problem}); {fix}") from error
    if isinstance(value, Family):
        return value
    if isinstance(value, type) and issubclass(value, BaseEnvironment):
        return family_of_class(value)
    if (adapted := adapt(value)) is not None:
        return family_of_class(adapted)
    raise UserError(
        f"environment.target={target} is a {type(value).__name__}; it must be a Family or a BaseEnvironment class, "
        "or an environment of Gymnasium, OpenEnv, SkyRL Gym, tinker-cookbook, TRL or verifiers"
    )


def family_of_class(cls: type[BaseEnvironment]) -> Family:
    """Return a family for an environment class. By default rows come from `data.path`, and an episode is a success if
    its reward sum is at least 1.

    Raises:
        UserError: a function of the family is a method of an episode.
    """
    from mtrl.datasets import load_rows

    for name in OF_ROWS:
        member = inspect.getattr_static(cls, name, None)
        if inspect.isfunction(member) and next(iter(inspect.signature(member).parameters), None) == "self":
            raise UserError(f"{cls.__name__}.{name} takes self, and no episode calls it; write @staticmethod above it")
    return Family(
        name=cls.__name__,
        environment=cls,
        load=getattr(cls, "load", load_rows),
        score=getattr(cls, "score", reward_is_success),
        demonstrate=getattr(cls, "demonstrate", None),
        gold=getattr(cls, "gold", None),
        decoys=getattr(cls, "decoys", None),
        answered=getattr(cls, "answered", None),
        worked_example=getattr(cls, "worked_example", None),
        explain=getattr(cls, "explain", None),
        waits_for_processes=getattr(cls, "waits_for_processes", False),
        measure=getattr(cls, "measure", None),
        offline=getattr(cls, "offline", None),
        shows_images=getattr(cls, "shows_images", False),
    )


def reward_is_success(trajectory: Trajectory, row: Row) -> float:
    """Score an episode without a scorer: return 1.0 for a reward sum of at least 1, else 0.0. A sum such as that of ten
    times 0.1 may be below 1 by rounding."""
    return float(math.fsum(trajectory.rewards) >= 1.0 - EPSILON)
