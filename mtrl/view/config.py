"""config.yaml of a run, with dotted keys. Somebody else may have written it, to do harm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from mtrl.tracking.run_dir import RunDir
from mtrl.view.kept import Foreign, read

LARGEST = 2**20
"""Bytes."""
DEEPEST = 50
"""Levels. The parser in C recurses, and far down it takes the whole process with it."""
MOST_KEYS = 5000
LARGEST_NUMBER = 2**53
"""JavaScript rounds larger ones, so they go as text."""

Flat = dict[str, Any]


def read_config(run: Path) -> tuple[Flat, list[str]]:
    """config.yaml of the run, and what is wrong with it."""
    try:
        tree = tree_of(read(RunDir(run).config, run, LARGEST))
    except Foreign as error:
        return {}, [str(error)]
    except OSError:
        return {}, []
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return {}, [f"config.yaml is not YAML ({next(iter(str(error).splitlines()), '')})"]
    flat: Flat = {}
    for key, value in leaves(tree, ""):
        if len(flat) == MOST_KEYS:
            return flat, [f"config.yaml has more than {MOST_KEYS} keys; the others are left out"]
        flat[key] = value
    return flat, []


def tree_of(text: bytes) -> Any:
    """What a YAML file holds.

    Raises:
        ValueError: it is nested too deep, or has aliases: a few lines of them are gigabytes, and no run writes any.
        yaml.YAMLError: it is no YAML, or holds other than plain values.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = 0
    for event in yaml.parse(text, Loader=loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"it has an alias, *{event.anchor}; write the value out")
        if depth > DEEPEST:
            raise ValueError(f"it has more than {DEEPEST} levels")
        if isinstance(event, yaml.ScalarEvent) and event.implicit[0] and _is_long_number(event.value):
            raise ValueError(f"it has a number of {len(event.value)} digits")
    return yaml.load(text, Loader=loader)


def _is_long_number(text: str) -> bool:
    """Digits and what stands between them (base 60, of YAML 1.1), so many that reading them takes seconds."""
    return len(text) > 1000 and text[:1000].translate(_DIGITS) == ""


_DIGITS = str.maketrans("", "", "+-0123456789abcdefABCDEFxo_:.")


def leaves(tree: Any, prefix: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Dotted keys and values; lists are values, as text where they hold more than plain values."""
    if isinstance(tree, dict) and tree and depth < 20:
        for key, value in tree.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key), depth + 1)
    elif prefix:
        yield prefix, plain(tree)


def plain(value: Any) -> Any:
    """A value as JSON and JavaScript have it; others as text, cut where it is long."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > LARGEST_NUMBER:
        return str(value) if value.bit_length() < 2**10 else f"{value:#x}"[:200]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6) if not isinstance(value, dict) else "{}"
    return text[:2000].removesuffix("...\n").strip()
