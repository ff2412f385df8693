"""YAML of others, read only where it stays small: a few lines of aliases are gigabytes once they are written out."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mtrl.errors import UserError

LARGEST = 2**20
"""Bytes of a file."""
DEEPEST = 50
"""Levels. The parser in C recurses, and far down it takes the whole process with it."""
MOST_WRITTEN_OUT = 2**22
"""Characters of all values with the aliases written out; the configuration of a run has a few thousand."""
COST = 16
"""Characters that a value counts at least."""
HEAD = '# The configuration of a run, with every value resolved; the line "..." is its end.'
END = "..."
"""YAML's own end of a document. A file that was cut between two values is YAML too, and lacks this line alone."""
FIX = "restore the file from a copy of its run, or name another run"
_NUMBER = re.compile(r"[-+0-9a-fA-FxXo_:.]{1000}")
"""The beginning of a number (also of base 60, of YAML 1.1) that is so long that reading it takes seconds."""

_BEGINS = re.compile(r"(\\*)\$\{")
"""The beginning of an interpolation, with the backslashes before it."""


class TooLargeError(ValueError):
    """The YAML is small and its values are not; the message says what of them."""


def check_size(text: bytes | str) -> None:
    """
    Raises:
        TooLargeError: values or levels are too many, with all aliases written out, one holds itself, or a number has
            too many digits.
        yaml.YAMLError: it is no YAML.
    """
    anchors: dict[str, int] = {}
    opened: list[tuple[str | None, int]] = []
    """Of each collection that is open: its anchor, and the characters before it."""
    count = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.AliasEvent):
            if any(event.anchor == anchor for anchor, _ in opened):
                raise TooLargeError(f"*{event.anchor} holds itself")
            count += anchors.get(event.anchor, COST)
        elif isinstance(event, yaml.ScalarEvent):
            count += COST + len(event.value)
            if event.anchor:
                anchors[event.anchor] = COST + len(event.value)
            if event.implicit[0] and _NUMBER.match(event.value):
                raise TooLargeError(f"it has a number of {len(event.value)} digits")
        elif isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, count))
            count += COST
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            if anchor:
                anchors[anchor] = count - before
        if len(opened) > DEEPEST:
            raise TooLargeError(f"it has more than {DEEPEST} levels")
        if count > MOST_WRITTEN_OUT:
            raise TooLargeError(f"it has more than {MOST_WRITTEN_OUT:,} characters, with its aliases written out")


def literal(value: Any) -> Any:
    """`value` with every `${` in its texts escaped, so that OmegaConf reads text where it would read an interpolation.

    A run writes its configuration resolved. What looks like an interpolation in it is a text, or it was put there:
    `${oc.env:API_KEY}` would read a secret of the reader, and a few lines that name each other would be gigabytes.
    """
    if isinstance(value, dict):
        return {key: literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [literal(item) for item in value]
    return _BEGINS.sub(r"\1\1\\${", value) if isinstance(value, str) else value


def with_end(text: str) -> str:
    """The YAML of a configuration as a config.yaml holds it, so that `is_cut` can tell whether all of it is there."""
    return f"{HEAD}\n{text}{END}\n"


def is_cut(text: str) -> bool:
    """Whether the end of what `with_end` wrote is missing. Files of older versions and of others have no such mark."""
    return text.startswith(HEAD) and not text.endswith(f"\n{END}\n")


def load_config(path: Path) -> DictConfig:
    """A config.yaml, which somebody else may have written; it holds no interpolations.

    Raises:
        UserError: it is no YAML mapping, too large, empty, or cut.
    """
    try:
        text = text_of(path)
        check_size(text)
        tree: Any = OmegaConf.load(StringIO(text))
    except TooLargeError as error:
        raise UserError(f"{path} is not read: {error}; {FIX}") from None
    except (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as YAML ({type(error).__name__}); {FIX}") from error
    if is_cut(text):
        raise UserError(f'{path} is cut: its last line, "{END}", is missing{_and_a_key(tree)}; {FIX}')
    if not isinstance(tree, DictConfig) or not tree:
        raise UserError(f"{path} is no configuration of a run, for it holds no keys with values; {FIX}")
    return OmegaConf.create(literal(OmegaConf.to_container(tree)))


def _and_a_key(tree: DictConfig) -> str:
    """The first key of the schema that a configuration does not have."""
    from mtrl.config.keys import flat
    from mtrl.config.schema import Config

    there: Any = OmegaConf.to_container(tree)
    schema: Any = OmegaConf.to_container(OmegaConf.structured(Config))
    missing = [key for key in flat(schema) if key not in flat(there)]
    return f", and so are keys such as {missing[0]}" if missing else ""


def text_of(path: Path) -> str:
    """
    Raises:
        TooLargeError: it has too many bytes.
    """
    with path.open("rb") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise TooLargeError(f"it has more than {LARGEST:,} bytes")
    return content.decode("utf-8")
