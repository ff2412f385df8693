"""Display of the composed configuration as a tree, with values that differ from the defaults in bold."""

from __future__ import annotations

import sys
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mtrl.config import keys


def show(cfg: DictConfig) -> None:
    """Print the configuration as a tree."""
    from rich.console import Console
    from rich.tree import Tree

    values: Any = OmegaConf.to_container(cfg, resolve=True)
    tree = Tree(f"[bold]{values.pop('name')}[/] in {values.pop('run_dir')}")
    _grow(tree, values, "")
    Console(file=sys.stdout, highlight=False).print(tree)


def _grow(branch: Any, values: dict[str, Any], prefix: str) -> None:
    """Add one line with the settings of a section, and one branch for each subsection."""
    from rich.text import Text

    sections = {name: value for name, value in values.items() if _is_section(prefix + name, value)}
    line = Text()
    for name, value in values.items():
        if name not in sections:
            changed = value != _plain(keys.all_keys()[prefix + name].default)
            line.append(f"{name}={keys.typed(value)}  ", style="bold cyan" if changed else "dim")
    if line:
        branch.add(line)
    for name, value in sections.items():
        _grow(branch.add(f"[bold]{name}[/]"), value, f"{prefix}{name}.")


def _is_section(path: str, value: Any) -> bool:
    return isinstance(value, dict) and keys.all_keys()[path].is_section


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
