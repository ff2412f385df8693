"""config.yaml of a run. The file may come from another person and be malicious."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING, OmegaConf

from mtrl.config import plain_yaml
from mtrl.config.keys import flat
from mtrl.config.plain_yaml import LARGEST, check_size, is_cut
from mtrl.config.schema import Config
from mtrl.errors import UserError
from mtrl.record.reading import Foreign, read, state_of
from mtrl.record.run_dir import RunDir

MOST_KEYS = 5000
LARGEST_NUMBER = 2**53
"""Largest magnitude of an integer that is sent as a number. JavaScript rounds larger ones, so they are sent as text."""

Flat = dict[str, Any]


@dataclass(frozen=True)
class StoredConfig:
    """What can be read of config.yaml."""

    tree: dict[str, Any]
    """The nested configuration; empty if the file is missing or unreadable."""
    problems: list[str]
    """Sentences about what cannot be read, without paths outside of the run."""

    @cached_property
    def flat(self) -> Flat:
        """The first `MOST_KEYS` values by dotted key, converted for JSON and JavaScript."""
        return dict(islice(leaves(self.tree, ""), MOST_KEYS))


def read_config(run: Path) -> StoredConfig:
    """Return what can be read of config.yaml of a run. For programs that need all of it, `read_whole_config` raises an
    error instead."""
    try:
        text = read(RunDir(run).config, run, LARGEST)
        tree = tree_of(text)
    except Foreign as error:
        return StoredConfig({}, [str(error)])
    except OSError:
        return StoredConfig({}, [])
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return StoredConfig({}, [f"config.yaml is not YAML ({next(iter(str(error).splitlines()), '')})"])
    problems = ["config.yaml is cut: its end is missing"] if is_cut(text.decode(errors="replace")) else []
    tree = tree if isinstance(tree, dict) else {}
    if next(islice(leaves(tree, ""), MOST_KEYS, None), None) is not None:
        problems.append(f"config.yaml has more than {MOST_KEYS} keys; the others are left out")
    return StoredConfig(tree, problems)


def read_whole_config(run: Path) -> dict[str, Any]:
    """Return the nested configuration of a run. Texts that look like interpolations stay texts.

    Raises:
        UserError: config.yaml is missing, damaged or incomplete, or leads out of the run.
    """
    path = RunDir(run).config
    try:
        state_of(path, run, LARGEST)
    except Foreign as error:
        raise UserError(f"{path} is not read: {error}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give the folder of a run") from error
    return plain_yaml.read_config(path)


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a nested configuration by dotted key, merged over the defaults of the schema."""
    return {**_defaults(), **flat(config)}


@cache
def _defaults() -> dict[str, Any]:
    """Return the defaults by dotted key, without those that only a run has: missing values and interpolations."""
    tree = OmegaConf.to_container(OmegaConf.structured(Config), resolve=False)
    values = {} if not isinstance(tree, dict) else flat(tree)
    return {k: v for k, v in values.items() if not (isinstance(v, str) and (v == MISSING or "${" in v))}


def tree_of(text: bytes) -> Any:
    """Return the content of a YAML file.

    Raises:
        ValueError: The content is too large; see `check_size`.
        yaml.YAMLError: The text is not YAML, or holds values that are not plain.
    """
    check_size(text)
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def leaves(tree: Any, prefix: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values. Lists are values, converted to text."""
    if isinstance(tree, dict) and tree and depth < 20:
        for key, value in tree.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key), depth + 1)
    elif prefix:
        yield prefix, plain(tree)


def plain(value: Any) -> Any:
    """Convert a value for JSON and JavaScript. Values without an equivalent become text, cut if it is long."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > LARGEST_NUMBER:
        return str(value) if value.bit_length() < 2**10 else f"{value:#x}"[:200]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6) if not isinstance(value, dict) else "{}"
    return text[:2000].removesuffix("...\n").strip()
