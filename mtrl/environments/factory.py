"""Creates the task of a configuration: the family, its rows, and the factory of environments. It imports no torch."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from mtrl.config.derived import prompt_of
from mtrl.config.mixture import in_source, source_configs, weights_of
from mtrl.config.schema import Config
from mtrl.datasets import Splits, cap, cut_validation
from mtrl.environments.base import BaseEnvironment
from mtrl.environments.family import Family, get_family
from mtrl.environments.loaded_rows import checked_splits
from mtrl.environments.mixture import MixedEnvironment, mixed_family, mixed_splits
from mtrl.errors import UserError
from mtrl.utils.process_guard import CallTimeoutError, in_time
from mtrl.utils.user_code import reason

T = TypeVar("T")


@dataclass(frozen=True)
class Task:
    """The part of a run that needs no model: family, rows and environments."""

    family: Family
    splits: Splits
    make_environment: Callable[[], BaseEnvironment]
    sources: Mapping[str, Task] = field(default_factory=dict)
    """The tasks of a mixture by the name of their source, with their rows as in a run of their own; else empty."""
    make_offline: Callable[[], BaseEnvironment] | None = None
    """Factory of environments that make no requests to a server whose answers vary (`Family.offline`); None if
    `make_environment` is such a factory."""

    @property
    def make_for_demonstrations(self) -> Callable[[], BaseEnvironment]:
        """Factory of the environments for players with fixed responses, such as the demonstrator: they fit the offline
        settings alone, and a server that is down must not end their episodes."""
        return self.make_offline or self.make_environment


def load_task(config: Config) -> Task:
    """Load the task of a configuration, or the mixture of its sources. One environment of each is made and closed, so
    that errors show before any work.

    Raises:
        UserError: the environment or its loader does not take a key of `environment.config`, or refuses a value.
    """
    return _task_of(config, _load_one)


def task_without_rows(config: Config) -> Task:
    """Return the task of a configuration, or the mixture of its sources, without rows: for a process that gets its rows
    from another one."""
    return _task_of(config, _without_rows)


def _task_of(config: Config, make: Callable[[Config], Task]) -> Task:
    """Return the task that `make` makes, or the mixture of those that it makes of the sources."""
    if not config.environments:
        return make(config)
    tasks: dict[str, Task] = {}
    for name, own in source_configs(config).items():
        with in_source(name):
            tasks[name] = make(own)
    weights = weights_of(config)
    makers = {name: task.make_environment for name, task in tasks.items()}
    offline = {name: task.make_for_demonstrations for name, task in tasks.items()}
    return Task(
        mixed_family({name: task.family for name, task in tasks.items()}),
        mixed_splits({name: _drawn(task.splits, weights[name].is_ever_positive) for name, task in tasks.items()}),
        partial(MixedEnvironment, makers, config.generator.max_turns),
        tasks,
        partial(MixedEnvironment, offline, config.generator.max_turns) if offline != makers else None,
    )


def _drawn(splits: Splits, is_trained: bool) -> Splits:
    """Return the splits of a source, without training rows if its weight is always 0."""
    return splits if is_trained else replace(splits, train=[])


def _load_one(config: Config) -> Task:
    family = get_family(config.environment.name, config.environment.target)
    check_loader(config, family)
    splits = _loaded(config, family)
    splits = cut_validation(splits, config.data.validation_rows)
    make = environment_factory(config, family)
    try_out(make, config, family)
    offline = offline_config(config, family)
    return Task(family, splits, make, make_offline=None if offline is None else environment_factory(offline, family))


def _without_rows(config: Config) -> Task:
    family = get_family(config.environment.name, config.environment.target)
    return Task(family, Splits([], []), environment_factory(config, family))


def _loaded(config: Config, family: Family) -> Splits:
    """Return the splits of the family, loaded within `environment.episode_timeout`, with at most `data.max_train_rows`
    and `data.max_test_rows` rows, since the loader of a user may ignore these keys.

    Raises:
        UserError: the loader refuses its data, fails, hangs, or returns something other than splits of rows.
    """

    def load() -> Splits:
        found = family.load(config.data, config.seed, **loader_settings(config, family))
        return checked_splits(found, family.name)

    found = _tried(load, f"loading the rows of {family.name}", config, "episode_timeout", "loader or its data")
    return cap(found, config.data)


def offline_config(config: Config, family: Family) -> Config | None:
    """Return the configuration with the family's offline settings (`Family.offline`); None if the environment makes no
    requests to a server whose answers vary."""
    offline = None if family.offline is None else family.offline(config.environment.config)
    return None if offline is None else replace(config, environment=replace(config.environment, config=offline))


def environment_factory(config: Config, family: Family, max_turns: int | None = None) -> Callable[[], BaseEnvironment]:
    """Return a function that makes one environment; `max_turns` overrides `generator.max_turns`.

    Raises:
        UserError: the environment does not take a key of `environment.config`.
    """
    turns = config.generator.max_turns if max_turns is None else max_turns
    values: dict[str, Any] = {"max_turns": turns, **config.environment.config}
    if len(getattr(family.environment, "reward_schemes", ("default",))) > 1:
        values["reward"] = config.reward.scheme
    accepted = inspect.signature(family.environment).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in accepted.values()) and (unknown := set(values) - set(accepted)):
        name = getattr(family.environment, "__name__", family.name)
        if given := unknown & set(config.environment.config):
            raise UserError(
                f"environment.config.{min(given)} is not a key of {name}; it takes {', '.join(accepted) or 'none'}"
            )
        raise UserError(
            f"{name} does not take {min(unknown)}, with which every environment of it is made; give its __init__ the "
            f"arguments {min(unknown)} and **config, and let it call super().__init__(max_turns)"
        )
    return partial(family.environment, **values)


def loader_settings(config: Config, family: Family) -> dict[str, Any]:
    """Return the keyword arguments of the family's loader of rows: the keys of `environment.config`, and the kind of
    the prompts if the loader has a parameter `prompt`."""
    prompt = {"prompt": prompt_of(config)} if writes_prompts(family) else {}
    return {**prompt, **{str(key): value for key, value in config.environment.config.items()}}


def writes_prompts(family: Family) -> bool:
    """Return whether the family's loader of rows writes prompts of the kind that `environment.prompt` chooses."""
    return "prompt" in inspect.signature(family.load).parameters


def check_loader(config: Config, family: Family) -> None:
    """Check that the family's loader of rows takes the keys of `environment.config`.

    Raises:
        UserError: the loader does not take a key, or needs a key that is missing.
    """
    values = {str(key): value for key, value in config.environment.config.items()}
    try:
        inspect.signature(family.load).bind(config.data, config.seed, **loader_settings(config, family))
    except TypeError as error:
        raise UserError(
            f"environment.config={values} does not fit what loads the rows of {family.name} ({error}); "
            "it is called with data, seed and these keys: correct them, or let it take **config"
        ) from error


def try_out(make_environment: Callable[[], BaseEnvironment], config: Config, family: Family) -> None:
    """Make one environment and close it, each within `environment.step_timeout`.

    Raises:
        UserError: the arguments do not fit, or one of the two calls fails or hangs.
    """
    make = partial(_made, make_environment, config, family)
    environment = _tried(make, f"making an environment of {family.name}", config, "step_timeout", "environment")
    close = partial(close_now, environment)
    _tried(close, f"closing an environment of {family.name}", config, "step_timeout", "environment")


def _made(make_environment: Callable[[], BaseEnvironment], config: Config, family: Family) -> BaseEnvironment:
    try:
        return make_environment()
    except UserError:
        raise
    except TypeError as error:
        values = dict(config.environment.config)
        raise UserError(f"environment.config={values} does not fit {family.name}: {reason(error)}") from error


def _tried(call: Callable[[], T], what: str, config: Config, limit: str, culprit: str) -> T:
    """Return the result of a call of the user's code, with `environment.<limit>` as its time limit.

    Args:
        what: the action of the call, for the message.
        limit: key of `environment` that holds the time limit.
        culprit: the code or data to repair, for the message.

    Raises:
        UserError: the call fails or hangs.
    """
    seconds = getattr(config.environment, limit)
    try:
        return in_time(call, seconds)
    except CallTimeoutError:
        raise UserError(
            f"{what} took longer than environment.{limit}={seconds:g} s; fix the {culprit}, or raise it"
        ) from None
    except UserError:
        raise
    except BaseException as error:  # includes the user's SystemExit, which would end the run with its own status
        if isinstance(error, KeyboardInterrupt):
            raise
        raise UserError(f"{what} failed: {reason(error)}; fix the {culprit}") from error


def close_now(environment: BaseEnvironment) -> None:
    """Close an environment while no event loop runs; its `close` may be async."""
    closing: Any = environment.close()  # type: ignore[func-returns-value]
    if inspect.isawaitable(closing):
        asyncio.run(_wait(closing))


async def _wait(awaitable: Any) -> None:
    await awaitable
