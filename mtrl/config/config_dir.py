"""Checks of the folders that hold the user's own config groups (`--config-dir`, `hydra.searchpath`).

The files are checked before Hydra reads them, since a YAML bomb would make Hydra hang.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from yaml import YAMLError

from mtrl.config.plain_yaml import TooLargeError, check_size, text_of
from mtrl.errors import UserError

HEADER = "# @package _global_"
"""First line of a group's file whose keys are relative to the whole configuration instead of the group's section."""
GLOBAL_GROUPS = ("experiment", "debug", "placement", "sweep")
"""Groups whose files set keys of any section: each needs the header."""
PRIMARY = "config"
SEARCHED = "hydra.searchpath"
FILE, PACKAGE = "file://", "pkg://"


def names_folders(override: str) -> bool:
    """Whether an override sets `hydra.searchpath`, where Hydra looks for config groups."""
    return override.lstrip("+").partition("=")[0] == SEARCHED


def own_folders(overrides: Sequence[str], config_dir: str | None) -> list[Path]:
    """Return the folders with config groups that the command names, besides mtrl's own."""
    named = [place.removeprefix(FILE) for place in _searched(overrides) if not place.startswith(PACKAGE)]
    return [Path(folder) for folder in (*named, *([config_dir] if config_dir else []))]


def packages(overrides: Sequence[str]) -> list[str]:
    """Return the installed packages with config groups that the command names, as written in `hydra.searchpath`."""
    return [place for place in _searched(overrides) if place.startswith(PACKAGE)]


def _searched(overrides: Sequence[str]) -> list[str]:
    """Return the items of `hydra.searchpath`.

    Raises:
        UserError: the value is not a list of texts.
    """
    found: list[str] = []
    for override in filter(names_folders, overrides):
        try:
            value = OverridesParser.create().parse_override(override).value()
        except HydraException:
            value = None
        if not isinstance(value, list) or not all(isinstance(place, str) for place in value):
            raise UserError(
                f"{override} is no list of folders; write --config-dir FOLDER, or {SEARCHED}=[file://FOLDER]"
            )
        found += value
    return found


def check_folders(folders: Sequence[Path]) -> None:
    """Check that each folder exists, that its files are in groups and not too large, and that files of `GLOBAL_GROUPS`
    have the header. Files that are not YAML are skipped, since Hydra's error names the line.

    Raises:
        UserError: a folder does not exist, a file is too large, or Hydra would ignore or misread a file.
    """
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"--config-dir {folder} does not exist; name a folder with config groups of your own")
        for suffix in ("yaml", "yml"):
            if (file := folder / f"{PRIMARY}.{suffix}").exists():
                raise UserError(
                    f"{file} is not read, since mtrl has a config.yaml of its own; move its keys to "
                    f"{folder / 'experiment' / 'mine.yaml'} below a first line {HEADER!r}, and write experiment=mine"
                )
        for file in _files(folder, (".yaml",)):
            _check_file(file)
            group = file.relative_to(folder).parts[0]
            if group in GLOBAL_GROUPS and not _has_header(file):
                raise UserError(
                    f"{file} sets keys of other sections than {group}; write {HEADER!r} as its first line, above "
                    "everything else"
                )


def _files(folder: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Yield the files of a folder and its subfolders with one of these suffixes, in order. Links to folders are
    followed, as Hydra does, but each folder is visited once."""
    seen = set()
    for place, inside, names in os.walk(folder, followlinks=True):
        inside.sort()
        if (real := os.path.realpath(place)) in seen:
            inside.clear()
            continue
        seen.add(real)
        yield from (Path(place, name) for name in sorted(names) if name.endswith(suffixes))


def _check_file(file: Path) -> None:
    try:
        check_size(text_of(file))
    except TooLargeError as error:
        raise UserError(f"{file} is not read: {error}; write less, or remove it") from None
    except (YAMLError, OSError, UnicodeDecodeError):
        return


def check_primary(name: str | None, path: str | None) -> None:
    """Check that `--config-name` and `--config-path` do not name another primary configuration than `config`.

    Raises:
        UserError: `name` is another configuration, or `path` is set.
    """
    if name not in (None, PRIMARY):
        raise UserError(
            f"--config-name {name} is not known, since every run begins with mtrl's own config.yaml; put the keys into "
            f"FOLDER/experiment/{name}.yaml below a first line {HEADER!r}, and write --config-dir FOLDER "
            f"experiment={name}"
        )
    if path is not None:
        raise UserError(
            f"--config-path {path} is not taken, since every run begins with mtrl's own config.yaml; put your files "
            f"into {path}/experiment below a first line {HEADER!r}, and write --config-dir {path} experiment=NAME"
        )


def misplaced(error: BaseException, folders: Sequence[Path]) -> UserError | None:
    """Return the error for a choice of a group that does not exist, if a file of that name is elsewhere in the user's
    folders; else None."""
    chosen = error.missing_cfg_file if isinstance(error, MissingConfigException) else None
    if not chosen:
        return None
    group, _, option = chosen.removesuffix(".yaml").rpartition("/")
    for folder in folders:
        for file in _files(folder, (f"{option}.yaml", f"{option}.yml")):
            if file.stem != option:
                continue
            within = file.relative_to(folder).with_suffix("").as_posix()
            fix = f"rename it to {folder / group / option}.yaml"
            if file.suffix == ".yaml" and within.startswith(f"{group}/"):
                fix = f"write {group}={within.removeprefix(f'{group}/')}"
            return UserError(f"{group}={option} does not exist, and {file} is not it; {fix}")
    return None


def _has_header(file: Path) -> bool:
    """Return whether the first line that is not empty is a header, since Hydra ignores a header below a comment. An
    empty file needs no header."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    first = next((line for line in lines if line.strip()), "")
    return not first or first.lstrip().removeprefix("#").split()[:1] == ["@package"]


def config_dir_flags() -> list[str]:
    """Return the flag `--config-dir` of this command; empty without one."""
    sources = HydraConfig.get().runtime.config_sources
    return [f"--config-dir={source.path}" for source in sources if source.provider.endswith("command-line")]
