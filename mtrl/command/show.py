"""Display of the composed configuration: what differs from the defaults, as a tree."""

from __future__ import annotations

import sys
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mtrl.config import keys

TITLE = ("name", "run_dir")
"""Keys that the first line shows."""
DATA = ("model.recipe",)
"""Keys with data from a file of `conf/`, which are no settings of a run."""


def show(cfg: DictConfig) -> None:
    """Print the keys that differ from the defaults of the schema, section by section, and where all keys are."""
    from rich.console import Console
    from rich.tree import Tree

    values: Any = OmegaConf.to_container(cfg, resolve=True)
    name, run_dir = (values.pop(key) for key in TITLE)
    tree = Tree(f"[bold]{name}[/] in {run_dir}")
    _grow(tree, values, "")
    tree.add("[dim]every other key has its default; config.yaml in that folder has all of them[/]")
    Console(file=sys.stdout, highlight=False).print(tree)


def _grow(branch: Any, values: dict[str, Any], prefix: str) -> None:
    """Add one line with the changed settings of a section, and one branch for each subsection that has some."""
    from rich.text import Text

    changed = {name: value for name, value in values.items() if _is_changed(prefix + name, value)}
    sections = {name for name in changed if _is_section(prefix + name, changed[name])}
    line = Text("  ").join(
        Text.assemble((f"{name}=", "dim"), (keys.typed(value), "bold cyan"))
        for name, value in changed.items()
        if name not in sections
    )
    if line:
        branch.add(line)
    for name in changed:
        if name in sections:
            _grow(branch.add(f"[bold]{name}[/]"), changed[name], f"{prefix}{name}.")


def _is_changed(path: str, value: Any) -> bool:
    """Return whether a key, or any key of a section, differs from the default of the schema."""
    if path in DATA:
        return False
    if _is_section(path, value):
        return any(_is_changed(f"{path}.{name}", part) for name, part in value.items())
    return bool(value != _plain(keys.all_keys()[path].default))


def _is_section(path: str, value: Any) -> bool:
    return isinstance(value, dict) and keys.all_keys()[path].is_section


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
