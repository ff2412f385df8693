"""The command that repeats a run with one change. It gives the configuration as overrides of an experiment."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from mtrl.command.compose import merge
from mtrl.config import keys
from mtrl.config.overrides import CONF, normalise, written

OWN = ("run_dir", "resume", "parent")
"""Keys that are not copied to a new run."""
_NAME = re.compile(r"[A-Za-z_][\w-]*|\d+", re.ASCII)
"""Pattern of the names that Hydra reads as a part of a dotted key."""


def command(config: Mapping[str, Any], changes: Sequence[str], parent: Path | None) -> str:
    """Return the command `mtrl train …` that repeats the run with `changes`, as its child."""
    words = [*words_of(config, changes), *changes]
    if parent is not None:
        words.append(_word("parent", str(parent)))
    return shlex.join(["mtrl", "train", *words])


def words_of(config: Mapping[str, Any], changes: Sequence[str] = ()) -> list[str]:
    """Return the overrides that reproduce `config`, except for the keys of `changes`."""
    experiment = _experiment(config)
    changed = {change.partition("=")[0] for change in changes} | set(OWN)
    words = list(_differences(_base(experiment), config, changed))
    return [f"experiment={experiment}", *words]


def shipped(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key in the experiment that the run started from; None if it has no such key."""
    return keys.flat(_base(_experiment(config))).get(key)


@cache
def _base(experiment: str) -> Any:
    return OmegaConf.to_container(merge(normalise([f"experiment={experiment}"])), resolve=True)


def _experiment(config: Mapping[str, Any]) -> str:
    """Return the experiment that the run started from: it has the name of the run or of its task; otherwise the
    default experiment."""
    task = (config.get("environment") or {}).get("name")
    named = (name for name in (config.get("name"), task) if name and re.fullmatch(r"\w+", str(name)))
    return next((str(name) for name in named if (CONF / "experiment" / f"{name}.yaml").is_file()), "gsm8k")


def _differences(base: Mapping[str, Any], config: Mapping[str, Any], changed: set[str]) -> Iterator[str]:
    before, there = dict(_typed(base)), keys.flat(config)
    for key, value in _typed(config):
        known = keys.find(key)
        if key in changed or known is None or (key in before and _same(before[key], value)):
            continue
        yield _word(key, value)
    for key in keys.flat(base):
        known = keys.find(key)
        is_open = known is not None and known.path != key
        if is_open and key not in there and key not in changed:
            yield f"~{key}"


def _typed(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values as `keys.flat` does. A mapping is one value if one of its names cannot be a part of
    a dotted key on the command line."""
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and all(_NAME.fullmatch(str(name)) for name in value):
            yield from _typed(value, f"{path}.")
        else:
            yield path, value


def _same(first: Any, second: Any) -> bool:
    return bool(first == second)


def _word(key: str, value: Any) -> str:
    return f"{key}={written(value)}"
