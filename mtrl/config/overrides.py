"""Conversion of typed overrides to Hydra's form: any spelling of a known key, and an error message for all others."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mtrl
from mtrl.config import keys, messages
from mtrl.config.config_dir import own_folders
from mtrl.config.epochs import length_of
from mtrl.errors import UserError

CONF = Path(mtrl.__file__).parent.parent / "conf"
"""The config groups of this tree."""

_NULL = [path for path, key in keys.all_keys().items() if key.is_section and key.default is None]
_OVERRIDE = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[^=]+)(?P<value>=.*)?", re.DOTALL)
_PLAIN = re.compile(r"(?!(?i:null|true|false|nan|inf)\Z)(\.{0,2}/|[A-Za-z_])[\w./-]*", re.ASCII)
"""Pattern of texts that need no quotes in an override."""
_SPECIAL = re.compile(r"[\\()\[\]{}:=, \t]")
"""Pattern of the characters that are escaped in the names of a mapping."""
_NUMBER_OR_BOOLEAN = re.compile(r"\s*([+-]?(\d[\d_]*\.?[\d_]*|\.\d+)(e[+-]?\d+)?|inf|nan|true|false)\s*", re.IGNORECASE)


def normalise(overrides: Sequence[str], config_dir: str | None = None) -> list[str]:
    """Return the overrides with the signs that Hydra needs; `+experiment=x` and `experiment=x` are accepted alike.

    Raises:
        UserError: a key does not exist, a word is not an override, or two lengths of the run are given.
    """
    folders = own_folders(overrides, config_dir)
    groups = (_groups(CONF) - {"hydra", *messages.ELSEWHERE}).union(*map(_groups, folders))
    plain = [_normalise(override, groups) for override in overrides]
    return [*_made(plain), *length_of(plain, bool(folders)), *plain]


def _made(overrides: Sequence[str]) -> list[str]:
    """Return overrides that create the sections that are null by default and of which a key is set."""
    plain = [override.lstrip("+") for override in overrides]
    needed = [s for s in _NULL if any(override.startswith((f"{s}.", f"{s}={{")) for override in plain)]
    return ["++{}={{{}:{{}}}}".format(*section.rsplit(".", 1)) for section in needed]


def _groups(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir()} if folder.is_dir() else set()


def _normalise(override: str, groups: set[str]) -> str:
    parts = _OVERRIDE.fullmatch(override)
    if parts is None:
        raise UserError(f"{override!r} is not a setting; write key=value, for example experiment=gsm8k")
    sign, key, value = parts["sign"] or "", parts["key"], parts["value"] or ""
    if re.match(r"hydra[./]", key) or "@" in key:
        return override  # Hydra's own keys and packages stay unchanged
    if sign == "~":
        return _removal(override, key, groups)
    if not value:
        raise UserError(f"{override!r} is not a setting; write key=value, for example experiment=gsm8k")
    if key in groups:
        return _choice(override, key, value)
    known = keys.find(key)
    if known is None:
        raise messages.unknown_key(key, value[1:])
    # Hydra forbids new keys in every mapping, even in those with arbitrary keys; `++` adds or changes a key.
    has_names = known.is_open or (known.is_section and value.startswith("={"))  # a section may contain such a mapping
    return ("++" if has_names else "") + key + value


def _choice(override: str, group: str, value: str) -> str:
    """Normalise the choice of a group. A group of this tree is in the defaults list and takes no sign; a user's own
    group needs its `+`.

    Raises:
        UserError: the choice is a file outside the config groups, which would not be checked, or there are several.
    """
    if "../" in value:
        raise UserError(
            f"{group}{value} is a file outside of the config groups; put it into FOLDER/{group}, and write "
            f"--config-dir FOLDER {group}=NAME"
        )
    if not (CONF / group).is_dir():
        return override
    if value == "=null":
        return f"~{group}"
    # Hydra takes no number and no boolean for a group; quoted it is a name, which Hydra looks for.
    names = re.fullmatch(r"=\s*\[(.*)\]\s*", value)
    if names is None:
        return f"{group}={_name(value[1:])}"
    choices = [name.strip() for name in names[1].split(",") if name.strip()]
    if len(choices) > 1:  # Hydra would merge the files
        raise UserError(
            f"{group}{value} makes {len(choices)} choices for one part of the run; choose one of them, for example "
            f"{group}={choices[0]}; mtrl train -m {group}={','.join(choices)} makes a run of each"
        )
    return f"{group}=[{','.join(map(_name, choices))}]"


def _name(word: str) -> str:
    return quoted("", word)[1:] if _NUMBER_OR_BOOLEAN.fullmatch(word) else word


def _removal(override: str, key: str, groups: set[str]) -> str:
    """Check a removal: choices of groups, and keys that the schema does not have, can be removed."""
    known = keys.find(key)
    if key not in groups and known is None:
        raise messages.unknown_key(key)
    if key not in groups and known is not None and known.path == key:
        raise UserError(f"{override}: a key of the schema cannot be removed; write {key}={known.example()}")
    return override


def key_of(override: str) -> str:
    """Return the key that an override sets, without Hydra's signs."""
    return override.lstrip("+~").partition("=")[0]


def quoted(key: str, value: str) -> str:
    """Return an override that sets `key` to exactly this text, with special characters escaped."""
    doubled = re.sub(r"\\+(?='|\Z)", lambda match: 2 * match[0], value)  # Hydra reads all other backslashes unchanged
    return f"{key}='" + doubled.replace("'", "\\'") + "'"


def written(value: Any) -> str:
    """Return a value in Hydra's grammar, with texts quoted so that Hydra reads them unchanged.

    Names of a mapping cannot be quoted: their special characters are escaped, and Hydra refuses names with quotes or
    with letters beyond ASCII.
    """
    if isinstance(value, Mapping):
        names = (_SPECIAL.sub(r"\\\g<0>", str(key)) for key in value)
        return "{" + ",".join(f"{key}:{written(item)}" for key, item in zip(names, value.values(), strict=True)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(written, value)) + "]"
    if value is None or isinstance(value, bool | int | float):
        return keys.typed(value)
    return str(value) if _PLAIN.fullmatch(str(value)) else quoted("", str(value))[1:]


def dashed(word: str) -> UserError:
    """Return the error for a key that is written as an option, such as `--learning_rate`."""
    path, _, value = word.lstrip("-").partition("=")
    path = path.replace("-", "_")
    if keys.find(path):
        return UserError(f"{word} is not an option; keys are written without dashes: {path}={value or '...'}")
    return UserError(f"{messages.unknown_key(path, value or None)} (keys are written key=value, without dashes)")
