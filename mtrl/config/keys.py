"""The keys of the schema as dotted paths, with their types and values, and the nearest match of an unknown key."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mtrl.config.field import Bound
from mtrl.config.schema import Config


@dataclass(frozen=True)
class Key:
    """One key of the configuration; a section (`trainer.optimizer`) is a key too."""

    path: str
    type: Any
    """Type of the value without `None`; a dataclass for a section."""
    optional: bool
    default: Any
    bound: Bound | None = None
    choices: tuple[str, ...] = ()
    """Words of which the value is one; empty: the schema does not limit it to words."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Other words that users may expect, each with the rest of the sentence that refuses it."""
    functions: tuple[str, ...] = ()
    """Names and aliases of mtrl's own functions of which the value is one, unless it is `package.module.function`."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Alias -> name of a function."""
    read_with: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Path of another key -> its words with which this key is read; empty: it is always read."""
    program: str = ""
    """The one command that reads the key; empty: training reads it."""
    affects_policy: bool = True
    """Whether the key has an effect on the policy that a run trains."""

    @property
    def is_section(self) -> bool:
        return is_dataclass(self.type)

    @property
    def is_open(self) -> bool:
        """Whether it may hold keys that are not in the schema; another part of mtrl checks them."""
        return typing.get_origin(self.type) is dict

    def expected(self) -> str:
        """Return the type in words."""
        words = "a section" if self.is_section else _words(self.type)
        return f"{words} or null" if self.optional else words

    def example(self) -> str:
        """Return a valid value, as typed on the command line."""
        is_plain = self.default not in (None, MISSING, []) and "${" not in str(self.default)
        if is_plain and not self.is_section:
            return typed(self.default)
        return _EXAMPLES.get(self.type, "null" if self.optional else "...")


_EXAMPLES = {int: "8", float: "0.5", bool: "true", str: "text", list[str]: "[text]"}
_SCALARS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


def _words(kind: Any) -> str:
    if kind in _SCALARS:
        return _SCALARS[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    plural = {int: "integers", float: "numbers", bool: "booleans", str: "texts"}
    if origin is list:
        return f"a list of {plural.get(arguments[0], 'values')}"
    if origin is tuple:
        return f"a list of {len(arguments)} {plural.get(arguments[0], 'values')}"
    return "a mapping of names to values"


def typed(value: Any) -> str:
    """Format a value as it is typed on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{typed(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(typed, value)) + "]"
    return str(value)


@cache
def all_keys() -> dict[str, Key]:
    """Return every key of the schema by its path, each section before its keys."""
    return {key.path: key for key in _walk(Config(), "")}


def _walk(section: Any, prefix: str) -> Iterator[Key]:
    hints = typing.get_type_hints(type(section))
    for entry in fields(section):
        kind, optional = _without_none(hints[entry.name])
        default = getattr(section, entry.name)
        key = Key(prefix + entry.name, kind, optional, default, **entry.metadata)
        key = replace(key, read_with={prefix + name: words for name, words in key.read_with.items()})
        yield key
        if key.is_section:
            yield from _walk(kind() if default is None else default, f"{key.path}.")


def _without_none(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (kind,) = (a for a in typing.get_args(hint) if a is not type(None))
        return kind, True
    return hint, False


def find(path: str) -> Key | None:
    """Return the key at `path`, or None. For a path below an open key (`environment.config.calculator`), return the
    open key."""
    key = all_keys().get(path)
    if key is not None or "." not in path:
        return key
    parent = find(path.rpartition(".")[0])
    return parent if parent is not None and parent.is_open else None


OWN_FUNCTIONS: dict[str, tuple[str, ...]] = {}
"""Key -> names of functions that modules, which may be a user's, have registered for it."""


def list_registered(path: str, names: Iterable[str]) -> None:
    """Add the names of functions that a module registers for a key, so that messages and completion list them too."""
    key = all_keys().get(path)
    if key is not None and key.functions:
        OWN_FUNCTIONS[path] = tuple(dict.fromkeys((*OWN_FUNCTIONS.get(path, ()), *names)))


def words(path: str) -> tuple[str, ...]:
    """Return the words and the names of functions that the key at `path` takes; empty if it takes other values."""
    key = all_keys().get(path)
    return () if key is None else tuple(dict.fromkeys((*key.choices, *key.functions, *OWN_FUNCTIONS.get(path, ()))))


def setting_at(values: Any, path: str) -> str:
    """Return `path=value` for the value at `path` of plain values, as typed on the command line."""
    return f"{path}={typed(value_at(values, path))}"


def without_effect_on_policy() -> tuple[str, ...]:
    """Return the keys and sections that have no effect on the policy that a run trains."""
    return tuple(path for path, key in all_keys().items() if not key.affects_policy)


@cache
def takes(path: str, value: str) -> bool:
    """Return whether a value, as typed on the command line, has the type of this key and lies within its bounds."""
    try:
        typed_value = OverridesParser.create().parse_override(f"{path}={value}").value()
        if path in all_keys():
            OmegaConf.update(_tree(), path, typed_value)
    except (HydraException, OmegaConfBaseException):
        return False
    key = all_keys().get(path)
    if key is None or not isinstance(typed_value, int | float):
        return True
    return (key.bound or Bound()).broken_by(typed_value) is None


@cache
def _tree() -> DictConfig:
    """Return the schema, including the sections that are null by default. `takes` sets values in this shared tree,
    which does not change the types."""
    tree = OmegaConf.structured(Config())
    for key in all_keys().values():
        if key.is_section and OmegaConf.select(tree, key.path) is None:
            OmegaConf.update(tree, key.path, key.type(), merge=False)
    return tree


def plain(cfg: DictConfig) -> dict[str, Any]:
    """Return the resolved values as plain dictionaries, in which `value_at` is many times as fast as
    `OmegaConf.select`."""
    values: Any = OmegaConf.to_container(cfg, resolve=True)
    return values


def value_at(values: Any, path: str) -> Any:
    """Return the value at a path of plain values; None if it is missing."""
    for name in path.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return None if values == MISSING else values


def settings() -> list[str]:
    """Return the paths of all keys that are not sections."""
    return [path for path, key in all_keys().items() if not key.is_section]


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known word that is most similar to `word`; None if none is similar enough."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)


TWINS = ("critic", "warm_start")
"""Sections that repeat the keys of another section (of an optimiser, of a model). Their keys are suggested only if the
wrong path names the section."""


def is_meant(known: str, path: str) -> bool:
    """Return whether the wrong `path` can mean the key `known`, of several keys with the same last word."""
    return all((twin in known.split(".")) == (twin in path) for twin in TWINS)


VAGUE = (
    *("name", "path", "mode", "enabled", "batch_size", "url", "target", "model", "config", "env", "args", "extra"),
    *("host", "port", "rows", "level", "experiment", "seconds", "json", "output", "split", "window", "python"),
)
"""Last words of keys that are ambiguous without their section."""


def is_vague(known: str, path: str) -> bool:
    """Whether the key `known` ends with one of the `VAGUE` words and is in another section than the wrong `path`, so
    that a value of one may be wrong for the other."""
    section, _, leaf = known.rpartition(".")
    return leaf in VAGUE and section != path.rpartition(".")[0]


@cache
def same_leaf(path: str) -> str | None:
    """Return the key with the same last word in another section, e.g. `algorithm.group_size` for
    `trainer.group_size`; None if there is none."""
    leaf = path.rpartition(".")[2]
    same = [known for known in settings() if known.rpartition(".")[2] == leaf]
    return max(
        same,
        key=lambda known: (is_meant(known, path), difflib.SequenceMatcher(None, path, known).ratio()),
        default=None,
    )


@cache
def nearest_key(path: str) -> str | None:
    """Return the most similar key to a misspelt one, in its section or else anywhere; None if none is similar."""
    section, _, leaf = path.rpartition(".")
    if near := nearest(leaf, children(section)):
        return f"{section}.{near}" if section else near
    leaves = {known.rpartition(".")[2]: known for known in reversed(settings()) if is_meant(known, path)}
    if near := nearest(leaf, leaves, cutoff=0.75):
        return leaves[near]
    return None if section in all_keys() else nearest(path, all_keys(), cutoff=0.75)


def children(section: str) -> list[str]:
    """Return the last words of the keys of a section; for an empty path, of the top level."""
    prefix = f"{section}." if section else ""
    return [k.removeprefix(prefix) for k in all_keys() if k.startswith(prefix) and "." not in k.removeprefix(prefix)]


def flat(tree: Mapping[Any, Any], prefix: str = "", keep_empty: bool = False) -> dict[str, Any]:
    """Flatten `{"a": {"b": 1}}` to `{"a.b": 1}`; lists are values.

    Args:
        keep_empty: whether an empty mapping is a value too; otherwise it gives no key.
    """
    found: dict[str, Any] = {}
    for key, value in tree.items():
        is_tree = isinstance(value, Mapping) and (value or not keep_empty)
        found |= flat(value, f"{prefix}{key}.", keep_empty) if is_tree else {f"{prefix}{key}": value}
    return found
