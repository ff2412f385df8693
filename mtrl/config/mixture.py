"""A mixture of tasks in one run (`environments`): the sources, and the configuration of each."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mtrl.config import keys
from mtrl.config.algorithm_schema import AlgorithmConfig
from mtrl.config.schema import Config, DataConfig, EnvironmentConfig, GeneratorConfig, RewardConfig
from mtrl.config.source_weights import Weight, read_weight, shares_of
from mtrl.errors import UserError

SECTIONS: dict[str, Any] = {
    "environment": EnvironmentConfig,
    "data": DataConfig,
    "reward": RewardConfig,
    "generator": GeneratorConfig,
    "algorithm": AlgorithmConfig,
}
"""Sections of which a source may set keys."""
KEYS = ("weight", *SECTIONS)
"""Keys of a source."""
OWN = {
    "environment": ("name", "target", "config", "prompt", "step_timeout", "episode_timeout", "retries"),
    "generator": ("max_turns", "max_context_length", "sampling_params.max_generate_length"),
    "algorithm": ("group_size",),
}
"""Keys that a source may set in a section; all keys of the other sections."""
RESERVED = (
    *("breaks", "claims", "completion", "components", "context", "episode", "episodes", "failed_episodes", "field"),
    *("field_accuracy", "fields", "format", "gateway", "lenient_frac", "measures", "metrics", "out_of_turns", "reward"),
    *("stop", "strict_frac", "success", "tokens", "turns", "stage", "too_easy_frac", "too_hard_frac", "tried_frac"),
)
"""Second words of metric names such as `rollout/success/mean`. A source of a mixture and a role of self-play have
metrics `rollout/NAME/…`, so neither can have one of these names."""


def unfit(name: str) -> str | None:
    """Return why a source or a role cannot have this name; None if it can."""
    if name in RESERVED:
        return "it is a word of other metrics"
    return None if re.fullmatch(r"[A-Za-z]\w*", name) else "it must be letters, digits and _"


def weights_of(config: Config) -> dict[str, Weight]:
    """Return the weight of each source by its name.

    Raises:
        UserError: a weight is neither a number of at least 0 nor a schedule of such numbers, or all weights are 0 at
            some number of rows.
    """
    weights = {
        str(name): read_weight(str(name), source.get("weight", 1.0)) for name, source in _sources(config).items()
    }
    for rows in sorted({rows for weight in weights.values() for rows, _ in weight.points}):
        if not any(weight.at(rows) for weight in weights.values()):
            when = f" after {rows} rows" if rows else ""
            raise UserError(
                f"the weights of environments {', '.join(weights)} sum to 0{when}, so no row can be drawn; set "
                f"environments.{next(iter(weights))}.weight=1.0"
            )
    return weights


def source_configs(config: Config) -> dict[str, Config]:
    """Return the configuration that each source would have in a run of its own, by name; empty without a mixture.

    A source starts from the settings of the run and changes the keys that it sets. If it names a task,
    `environment.config` starts empty.

    Raises:
        UserError: a name, a key or a value of a source is wrong.
    """
    return {str(name): _source_config(config, str(name), source) for name, source in _sources(config).items()}


def described_tasks(config: Config) -> str:
    """Return the tasks of a run with the origin of their rows and the number of turns, for the lines at its start;
    those of a mixture with their shares of the prompts at the start, and with a group size that is not the run's."""
    weights = weights_of(config)
    shares, own = shares_of(weights, 0) if weights else {}, []
    for name, each in source_configs(config).items():
        size = each.algorithm.group_size
        group = f", groups of {size}" if size != config.algorithm.group_size else ""
        later = " at first" if len(weights[name].points) > 1 else ""
        own.append(f"{shares[name]:.0%}{later} {name}: {described_tasks(each)}{group}")
    task = config.environment.target or config.environment.name
    turns = f"at most {config.generator.max_turns} turns"
    return "; ".join(own) or f"{task}, {config.data.path or 'synthetic rows'}, {turns}"


def group_sizes(config: Config) -> dict[str, int]:
    """Return the number of trajectories per prompt of each source by its name; empty without a mixture."""
    return {name: own.algorithm.group_size for name, own in source_configs(config).items()}


def setters(environments: Any, path: str) -> list[str]:
    """Return the names of the sources that replace the run's value at `path`, which may lie below `environment.config`.
    A source that names a task replaces the whole task of the run.

    Args:
        environments: the plain value of `environments`.
    """
    return [str(name) for name, source in _sections(environments).items() if _sets(_sections(source), path)]


def is_replaced(environments: Any, path: str) -> bool:
    """Return whether every source of a mixture replaces the run's value at `path`, so that no episode reads it."""
    sources = _sections(environments)
    return bool(sources) and len(setters(sources, path)) == len(sources)


def _sections(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _sets(source: Mapping[str, Any], path: str) -> bool:
    section, *names = path.split(".")
    given: Any = source.get(section)
    names_task = section == "environment" and bool({"name", "target"} & _sections(given).keys())
    if names_task and names[:1] in (["name"], ["target"], ["config"]):
        return True
    for name in names:
        if name not in _sections(given):
            return False
        given = given[name]
    return not isinstance(given, Mapping)  # a mapping is merged with that of the run


def row_id(name: str, id: Any) -> str:
    """Return the id of a row in a mixture; it begins with the name of its source."""
    return f"{name}/{id}"


def source_of(row_id: str) -> str:
    """Return the name of the source of a row of a mixture, or of a trajectory, from its id."""
    return row_id.partition("/")[0]


@contextmanager
def in_source(name: str) -> Iterator[None]:
    """Context in which an error of the user's names the source first."""
    try:
        yield
    except UserError as error:
        raise UserError(f"environments.{name}: {error}") from error


def _sources(config: Config) -> Mapping[str, Mapping[str, Any]]:
    for name, source in config.environments.items():
        if why := unfit(str(name)):
            raise UserError(f"environments.{name} cannot be the name of a source, since {why}; choose another name")
        if not isinstance(source, Mapping):
            raise UserError(f"environments.{name}={keys.typed(source)} must be a section with {', '.join(KEYS)}")
        if unknown := [key for key in source if key not in KEYS]:
            raise _unknown(f"environments.{name}", unknown[0], KEYS)
        if not source.get("environment") and not source.get("data"):
            raise UserError(
                f"environments.{name} sets neither environment nor data; write for example "
                f"environments.{name}.environment.name=gsm8k, or correct the name of the source"
            )
    return config.environments


def _source_config(config: Config, name: str, source: Mapping[str, Any]) -> Config:
    sections: dict[str, Any] = {
        section: _changed(getattr(config, section), section, source.get(section) or {}, f"environments.{name}")
        for section in SECTIONS
    }
    return replace(config, environments={}, **sections)


def _changed(base: Any, section: str, given: Any, source: str) -> Any:
    """Return a section of the run with the keys that a source sets in it."""
    place = f"{source}.{section}"
    if not isinstance(given, Mapping):
        raise UserError(f"{place}={keys.typed(given)} must be a section with keys of its own")
    if not given:
        return copy.deepcopy(base)
    known = [entry.name for entry in fields(SECTIONS[section])]
    if unknown := [key for key in given if key not in known]:
        raise _unknown(place, unknown[0], known)
    if section in OWN:
        paths = keys.flat(given, "")
        if other := [path for path in paths if not any(f"{path}.".startswith(f"{own}.") for own in OWN[section])]:
            raise UserError(
                f"{place}.{other[0]} cannot differ between the sources of a run; set {section}.{other[0]} for all"
            )
    if section == "environment" and ("name" in given or "target" in given):
        base, given = replace(base, target=None, config={}), {"name": given.get("target"), **given}
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(base), given))
    except OmegaConfBaseException as error:
        key = str(error.full_key).partition(".")[0]
        expected = keys.all_keys()[f"{section}.{key}"].expected()
        raise UserError(f"{place}.{key}={keys.typed(given.get(key))} must be {expected}") from error


def _unknown(place: str, key: str, known: Any) -> UserError:
    near = keys.nearest(str(key), known)
    advice = f"did you mean {place}.{near}?" if near else f"it has {', '.join(known)}"
    return UserError(f"{place}.{key} is not a key of a source; {advice}")
