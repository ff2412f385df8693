"""Write the documents that are generated from the code: the configuration reference and other frameworks' names.

python scripts/write_reference.py            write docs/configuration.md and the tables of docs/migration.md
python scripts/write_reference.py --check    exit with status 1 if they do not match the code
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path

from omegaconf import MISSING

from mtrl.config import keys
from mtrl.config.dialect_values import FOREIGN_WHEN_FALSE, VALUES, VALUES_OF_FOREIGN_KEY
from mtrl.config.dialects import FRAMEWORKS
from mtrl.config.keys import Key
from mtrl.config.schema import Config

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
BEGIN, END = "<!-- made by scripts/write_reference.py -->", "<!-- /made -->"
OPENING = """\
# Configuration reference

The tables list every key of the schema (`mtrl/config/schema.py`) with its type and its default. The files in `conf/`
are the choices of each group, a file of `conf/experiment/` sets several keys at once, and the settings of the command
line override both. A key that does not exist is refused, and the message names the nearest key.
"""


def configuration() -> str:
    """Return the page of all keys, with a table for each section."""
    sections = {key.path: key for key in keys.all_keys().values() if key.is_section}
    parts = [OPENING, table(key for key in top(Config) if not key.is_section)]
    for key in sections.values():
        alike = [other for other in sections if signature(sections[other]) == signature(key)]
        home = sections[min(alike, key=len)]
        content = table(scalars(key)) if home is key else reference(key, home)
        parts.append(f"## `{key.path}`\n\n{about(key)}{content}")
    return "\n".join(parts)


def top(config: type) -> Iterator[Key]:
    return (keys.all_keys()[entry.name] for entry in fields(config))


def scalars(section: Key) -> list[Key]:
    """Return the keys of a section that are no sections."""
    own = [keys.all_keys()[f"{section.path}.{entry.name}"] for entry in fields(section.type)]
    return [key for key in own if not key.is_section]


def signature(section: Key) -> list[tuple[str, str, str]]:
    """Return name, type and description of each key of a section; sections with equal ones share a table."""
    return [(last(key.path), key.expected(), described(key)) for key in scalars(section)] or [(section.path, "", "")]


def reference(section: Key, home: Key) -> str:
    """Return a sentence that replaces the table of a section whose keys are those of another section."""
    pairs = zip(scalars(section), scalars(home), strict=True)
    different = [f"`{last(key.path)}={typed(key)}`" for key, same in pairs if key.default != same.default]
    exception = f", except for the default {', '.join(different)}" if different else ""
    return f"The keys, types and defaults are those of `{home.path}`{exception}.\n"


def about(key: Key) -> str:
    """Return the description of a section."""
    description = attribute_docstring(key) or " ".join((ast.get_docstring(tree(key.type)) or "").split())
    is_null = "Null unless one of its keys is set." if key.default is None else ""
    sentences = [part for part in (description, readers(key), is_null) if part]
    return f"{' '.join(sentences)}\n\n" if sentences else ""


def table(rows: Iterable[Key]) -> str:
    lines = [f"| `{key.path}` | {type_of(key)} | {default(key)} | {cell(described(key))} |\n" for key in rows]
    return "".join(["| key | type | default | description |\n|---|---|---|---|\n", *lines]) if lines else ""


def type_of(key: Key) -> str:
    """Return the words of the key, or its type without its article."""
    if not (words := [*key.choices, *key.functions]):
        return re.sub(r"^an? ", "", key.expected())
    more = ["package.module.function"] if key.functions else ["null"] if key.optional else []
    return cell(" | ".join([*words, *more]))


def typed(key: Key) -> str:
    return cell(keys.typed(key.default))


def default(key: Key) -> str:
    return "has to be set" if key.default == MISSING else f"`{typed(key)}`"


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def described(key: Key) -> str:
    """Return the description of a key: its attribute docstring in the schema, and what reads it."""
    return " ".join(part for part in (attribute_docstring(key), readers(key)) if part)


def readers(key: Key) -> str:
    """Return a sentence about the settings or the program that read the key; empty if every run reads it."""
    if key.program:
        return f"Only `{key.program}` reads {'this section' if key.is_section else 'it'}."
    settings = [f"`{chooser}={'|'.join(words)}`" for chooser, words in key.read_with.items()]
    subject = "This section" if key.is_section else "It"
    return f"{subject} is read with {' or '.join(settings)}." if settings else ""


def attribute_docstring(key: Key) -> str:
    """Return the attribute docstring of a key in the schema."""
    parent, _, name = key.path.rpartition(".")
    return words(keys.all_keys()[parent].type if parent else Config).get(name, "")


@cache
def words(kind: type) -> dict[str, str]:
    """Return the attribute docstring of each field of a dataclass and of its bases, by name."""
    found = {}
    for base in reversed(kind.__mro__[:-1]):
        name = ""
        for node in tree(base).body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                name = node.target.id
            elif name and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                found[name] = " ".join(inspect.cleandoc(str(node.value.value)).split())
                name = ""
    return found


@cache
def tree(kind: type) -> ast.ClassDef:
    assert is_dataclass(kind)
    (node,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(node, ast.ClassDef)
    return node


def names() -> str:
    """Return a table for each framework: its keys whose last part differs from mtrl's, and the answer to each."""
    parts = []
    for framework, entries in FRAMEWORKS.items():
        other = {theirs: ours for theirs, ours in entries.items() if last(theirs) != last(ours)}
        rows = "".join(f"| {theirs} | {ours_of(ours)} |\n" for ours, theirs in inverted(other).items())
        parts.append(f"### {framework}\n\n| there | here |\n|---|---|\n{rows}")
    tables = {**VALUES, **VALUES_OF_FOREIGN_KEY, **{key: {"false": ours} for key, ours in FOREIGN_WHEN_FALSE.items()}}
    values = "".join(
        f"| `{key}` | {theirs} | {cell(ours) if ours.startswith(('set ', 'leave ')) else f'`{ours}`'} |\n"
        for key, entries in tables.items()
        for ours, theirs in inverted(entries).items()
    )
    return "\n".join([*parts, f"### Values\n\n| key | there | here |\n|---|---|---|\n{values}"])


def last(path: str) -> str:
    return path.rpartition(".")[2]


def inverted(entries: dict[str, str]) -> dict[str, str]:
    """Return the foreign names, as one text in backticks, by the answer that they share."""
    found: dict[str, list[str]] = {}
    for theirs, ours in entries.items():
        found.setdefault(ours, []).append(f"`{theirs}`")
    return {ours: ", ".join(theirs) for ours, theirs in found.items()}


def ours_of(ours: str) -> str:
    """Return a key in backticks, and a sentence unchanged."""
    return cell(ours) if " " in ours else f"`{ours}`"


def between(page: str, made: str) -> str:
    """Return the page with the text between the markers replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{made}\n{END}{after}"


def documents() -> dict[Path, str]:
    """Return the generated content of each document."""
    migration = DOCS / "migration.md"
    return {
        DOCS / "configuration.md": configuration(),
        migration: between(migration.read_text(encoding="utf-8"), names()),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(argv).check
    made = documents()
    stale = [path for path, text in made.items() if not path.exists() or path.read_text("utf-8") != text]
    for path in stale:
        if check:
            print(f"docs/{path.name} is not what the code says; write it with: python scripts/write_reference.py")
        else:
            path.write_text(made[path], encoding="utf-8")
            print(f"written: docs/{path.name}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
