"""Reading of untrusted YAML with size limits, since a few lines of nested aliases can expand to gigabytes."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

from mtrl.errors import UserError

LARGEST = 2**20
"""Maximum size of a file, in bytes."""
DEEPEST = 50
"""Maximum nesting depth, in levels. The parser in C recurses, and deep nesting would crash the whole process."""
MOST_WRITTEN_OUT = 2**22
"""Maximum size of all values with aliases expanded, in characters; the configuration of a run has a few thousand."""
COST = 16
"""Characters that are counted for each value in addition to its text."""
HEAD = '# The configuration of a run, with every value resolved; the line "..." is its end.'
END = "..."
"""YAML's end-of-document marker. A file that was cut between two values is still valid YAML, and only the missing
marker shows the cut."""
FIX = "restore the file from a copy of its run, or name another run"
_NUMBER = re.compile(r"[-+0-9a-fA-FxXo_:.]{1000}")
"""Pattern of a number (also in base 60, as in YAML 1.1) with so many digits that parsing it takes seconds."""

_BEGINS = re.compile(r"(\\*)\$\{")
"""Pattern of the start of an interpolation, with the backslashes before it."""


@cache
def _loader() -> Any:
    """Return OmegaConf's loader (`1e-3` is a number, a date is a text, a repeated key is an error). It uses the faster
    parser in C if PyYAML has it."""
    rules = get_yaml_loader()
    if not yaml.__with_libyaml__:
        return rules
    from yaml.cyaml import CParser

    class Loader(CParser, rules):  # type: ignore[misc, valid-type]
        def __init__(self, text: str):
            CParser.__init__(self, text)
            yaml.constructor.SafeConstructor.__init__(self)
            yaml.resolver.Resolver.__init__(self)

    return Loader


class TooLargeError(ValueError):
    """The YAML, or its values after expansion, exceed a limit; the message names the limit."""


def check_size(text: bytes | str) -> None:
    """Check the size of a YAML document without building its values.

    Raises:
        TooLargeError: with aliases expanded, there are too many characters or levels, an alias contains itself, or a
            number has too many digits.
        yaml.YAMLError: the text is not YAML.
    """
    anchors: dict[str, int] = {}
    opened: list[tuple[str | None, int]] = []
    """For each open collection: its anchor, and the number of characters before it."""
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
    """Return `value` with every `${` in its texts escaped, so that OmegaConf reads a text and not an interpolation.

    A run writes its configuration resolved, so an apparent interpolation is either a text or malicious:
    `${oc.env:API_KEY}` would read a secret of the reader, and a few lines that refer to each other could expand to
    gigabytes.
    """
    if isinstance(value, dict):
        return {key: literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [literal(item) for item in value]
    return _BEGINS.sub(r"\1\1\\${", value) if isinstance(value, str) else value


def with_end(text: str) -> str:
    """Add the first and last line of a config.yaml, by which `is_cut` recognises an incomplete file."""
    return f"{HEAD}\n{text}{END}\n"


def is_cut(text: str) -> bool:
    """Return whether the last line that `with_end` added is missing. A file without its first line, such as one of an
    older version, counts as complete."""
    return text.startswith(HEAD) and not text.endswith(f"\n{END}\n")


def load_config(path: Path) -> DictConfig:
    """Load a config.yaml, which is untrusted; interpolations are read as text.

    Raises:
        UserError: the file is not a YAML mapping, too large, empty, or incomplete.
    """
    try:
        text = text_of(path)
        check_size(text)
        tree: Any = yaml.load(text, Loader=_loader())
        cfg = OmegaConf.create(literal(tree)) if isinstance(tree, dict) else None
    except TooLargeError as error:
        raise UserError(f"{path} is not read: {error}; {FIX}") from None
    except (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as YAML ({type(error).__name__}); {FIX}") from error
    if is_cut(text):
        raise UserError(f'{path} is cut: its last line, "{END}", is missing{_and_a_key(tree)}; {FIX}')
    if not cfg:
        raise UserError(f"{path} is no configuration of a run, for it holds no keys with values; {FIX}")
    return cfg


def _and_a_key(tree: Any) -> str:
    """Return the end of a sentence that names the first key of the schema that is missing; empty if none is."""
    from mtrl.config.keys import flat
    from mtrl.config.schema import Config

    there = tree if isinstance(tree, dict) else {}
    schema: Any = OmegaConf.to_container(OmegaConf.structured(Config))
    missing = [key for key in flat(schema) if key not in flat(there)]
    return f", and so are keys such as {missing[0]}" if missing else ""


def text_of(path: Path) -> str:
    """Return the text of a file.

    Raises:
        TooLargeError: the file has more than `LARGEST` bytes.
    """
    with path.open("rb") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise TooLargeError(f"it has more than {LARGEST:,} bytes")
    return content.decode("utf-8")


def read_config(path: Path) -> dict[str, Any]:
    """Read a config.yaml into plain dicts and lists.

    Raises:
        UserError: the file cannot be read as a configuration.
    """
    tree = OmegaConf.to_container(load_config(path), resolve=True)
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}
