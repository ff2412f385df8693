"""The folder of `--config-dir`: config groups of the user's own, and what is wrong with its files."""

from __future__ import annotations

from pathlib import Path

from mtrl.errors import UserError

HEADER = "# @package _global_"
"""With it the keys of a file of a group are those of the whole configuration."""
GLOBAL_GROUPS = ("experiment", "debug", "placement", "sweep")
"""Groups whose files set keys of any section: each needs the header."""
PRIMARY = "config"


def check_config_dir(folder: Path) -> None:
    """Its files are in groups, and those that set keys of any section say so.

    Raises:
        UserError: there is no such folder, or one of its files would not be read as it is meant.
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
    """`--config-name` names the one primary configuration that there is.

    Raises:
        UserError: it names another one.
    """
    if name not in (None, PRIMARY):
        raise UserError(
            f"--config-name {name} is not known, since every run begins with mtrl's own config.yaml; put the keys into "
            f"FOLDER/experiment/{name}.yaml below a first line {HEADER!r}, and write --config-dir FOLDER "
            f"experiment={name}"
        )


def _has_header(file: Path) -> bool:
    """Whether the first line with words is a header: Hydra reads none below a comment. An empty file needs none."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    first = next((line for line in lines if line.strip()), "")
    return not first or first.lstrip().removeprefix("#").split()[:1] == ["@package"]
