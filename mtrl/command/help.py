"""The text of `mtrl train --help`: the template of conf/config.yaml, filled with the groups and keys.

Hydra's own implementation takes seconds, because it copies every known schema once for each folder that it searches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template

from omegaconf import OmegaConf, open_dict

from mtrl.command.compose import merge_with_hydra
from mtrl.config.messages import ELSEWHERE


def help_text(overrides: Sequence[str], config_dir: str | None, resolve: bool = False) -> str:
    """Return the help text for these (normalised) overrides.

    Args:
        resolve: show the values of interpolations.

    Raises:
        UserError: the overrides are wrong; the message is one sentence.
    """
    cfg = merge_with_hydra(overrides, config_dir)
    with open_dict(cfg):
        hydra = cfg.pop("hydra")
    folders = [Path(source.path) for source in hydra.runtime.config_sources if source.schema == "file"]
    lines = [f"{group}: {', '.join(options)}\n" for group, options in sorted(config_groups(folders).items())]
    shown = {"APP_CONFIG_GROUPS": "".join(lines), "CONFIG": OmegaConf.to_yaml(cfg, resolve=resolve)}
    return Template(hydra.help.template).safe_substitute(shown)


def config_groups(folders: Iterable[Path]) -> dict[str, list[str]]:
    """Return each config group of these folders and its options, as they are typed, without groups that a run does not
    take."""
    found: dict[str, set[str]] = defaultdict(set)
    for folder in folders:
        for file in folder.glob("*/**/*.yaml"):
            found[file.parent.relative_to(folder).as_posix()].add(file.stem)
    taken = (group for group in found if group.partition("/")[0] not in {"hydra", *ELSEWHERE})
    return {group: sorted(found[group]) for group in taken}
