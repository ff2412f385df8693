"""Checks of the `--config-dir` folder, which holds the user's own config groups."""

from __future__ import annotations

from pathlib import Path

from mtrl.errors import UserError

HEADER = "# @package _global_"
"""First line of a group's file whose keys are relative to the whole configuration instead of the group's section."""
GLOBAL_GROUPS = ("experiment", "debug", "placement", "sweep")
"""Groups whose files set keys of any section: each needs the header."""
PRIMARY = "config"


def check_config_dir(folder: Path) -> None:
    """Check that all files of the folder are in groups, and that files of `GLOBAL_GROUPS` have the header.

    Raises:
        UserError: the folder does not exist, or Hydra would ignore or misread one of its files.
    """
    if not folder.is_dir():
        raise UserError(f"--config-dir {folder} does not exist; name a folder with config groups of your own")
    for suffix in ("yaml", "yml"):
        if (file := folder / f"{PRIMARY}.{suffix}").exists():
            raise UserError(
                f"{file} is not read, since mtrl has a config.yaml of its own; move its keys to "
                f"{folder / 'experiment' / 'mine.yaml'} below a first line {HEADER!r}, and write experiment=mine"
            )
    for group in GLOBAL_GROUPS:
        for file in sorted((folder / group).glob("*.yaml")):
            if not _has_header(file):
                raise UserError(
                    f"{file} sets keys of other sections than {group}; write {HEADER!r} as its first line, above "
                    "everything else"
                )


def check_config_name(name: str | None) -> None:
    """Check that `--config-name` names the only primary configuration, `config`.

    Raises:
        UserError: `name` is another configuration.
    """
    if name not in (None, PRIMARY):
        raise UserError(
            f"--config-name {name} is not known, since every run begins with mtrl's own config.yaml; put the keys into "
            f"FOLDER/experiment/{name}.yaml below a first line {HEADER!r}, and write --config-dir FOLDER "
            f"experiment={name}"
        )


def _has_header(file: Path) -> bool:
    """Return whether the first line that is not empty is a header, since Hydra ignores a header below a comment. An
    empty file needs no header."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    first = next((line for line in lines if line.strip()), "")
    return not first or first.lstrip().removeprefix("#").split()[:1] == ["@package"]
