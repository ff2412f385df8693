"""config.yaml of a run, with dotted keys. The file may come from another person and be malicious."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from mtrl.config.plain_yaml import LARGEST, check_size, is_cut
from mtrl.record.reading import Foreign, read
from mtrl.record.run_dir import RunDir

MOST_KEYS = 5000
LARGEST_NUMBER = 2**53
"""Largest magnitude of an integer that is sent as a number. JavaScript rounds larger ones, so they are sent as text."""

Flat = dict[str, Any]


def read_config(run: Path) -> tuple[Flat, list[str]]:
    """Return config.yaml of the run with dotted keys, and its problems as sentences."""
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
