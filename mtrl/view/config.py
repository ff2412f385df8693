"""config.yaml of a run, with dotted keys. Somebody else may have written it, to do harm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from mtrl.config.plain_yaml import LARGEST, check_size, is_cut
from mtrl.tracking.run_dir import RunDir
from mtrl.view.kept import Foreign, read

MOST_KEYS = 5000
LARGEST_NUMBER = 2**53
"""JavaScript rounds larger ones, so they go as text."""

Flat = dict[str, Any]


def read_config(run: Path) -> tuple[Flat, list[str]]:
    """config.yaml of the run, and what is wrong with it."""
    try:
        text = read(RunDir(run).config, run, LARGEST)
        tree = tree_of(text)
    except Foreign as error:
        return {}, [str(error)]
    except OSError:
        return {}, []
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return {}, [f"config.yaml is not YAML ({next(iter(str(error).splitlines()), '')})"]
    problems = ["config.yaml is cut: its end is missing"] if is_cut(text.decode(errors="replace")) else []
    flat: Flat = {}
    for key, value in leaves(tree, ""):
        if len(flat) == MOST_KEYS:
            return flat, [f"config.yaml has more than {MOST_KEYS} keys; the others are left out"]
        flat[key] = value
    return flat, problems


def tree_of(text: bytes) -> Any:
    """What a YAML file holds.

    Raises:
        ValueError: it is too large once it is read; see `check_size`.
        yaml.YAMLError: it is no YAML, or holds other than plain values.
    """
    check_size(text)
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


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
