"""Write the documents that are generated from the code: configuration reference, names of other frameworks, messages.

python scripts/write_reference.py            write docs/configuration.md, and the tables of two others
python scripts/write_reference.py --check    exit with status 1 if they do not match the code
"""

from __future__ import annotations

import argparse
import ast
import inspect
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

Every key of the schema (`mtrl/config/schema.py`), its type and its default. `conf/` holds the choices of each group; an
experiment (`conf/experiment/`) sets several at once, and words on the command line come last. A key that does not exist
is refused with the nearest one that does.
"""


def configuration() -> str:
    """Return the page of all keys, with a table for each section."""
    parts = [OPENING, table(key for key in top(Config) if not key.is_section)]
    for key in keys.all_keys().values():
        if key.is_section:
            own = [keys.all_keys()[f"{key.path}.{entry.name}"] for entry in fields(key.type)]
            rows = table(key for key in own if not key.is_section)
            parts += [f"## `{key.path}`\n\n{about(key)}{rows}"]
    return "\n".join(parts)


def top(config: type) -> Iterator[Key]:
    return (keys.all_keys()[entry.name] for entry in fields(config))


def about(key: Key) -> str:
    """Return the description of a section."""
    said = described(key) or own_words(key.type)
    is_null = " Null unless one of its keys is set." if key.default is None else ""
    return f"{said}{is_null}\n\n" if said or is_null else ""


def own_words(kind: type) -> str:
    """Return the docstring of a class; empty if it has none."""
    said = ast.get_docstring(tree(kind)) or ""
    return " ".join(said.split())


def table(rows: Iterable[Key]) -> str:
    lines = [f"| `{key.path}` | {key.expected()} | {default(key)} | {cell(described(key))} |\n" for key in rows]
    return "".join(["| key | type | default | |\n|---|---|---|---|\n", *lines]) if lines else ""


def default(key: Key) -> str:
    return "has to be set" if key.default == MISSING else f"`{cell(keys.typed(key.default))}`"


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def described(key: Key) -> str:
    """Return the attribute docstring of a key in the schema."""
    parent, _, name = key.path.rpartition(".")
    return words(keys.all_keys()[parent].type if parent else Config).get(name, "")


@cache
def words(kind: type) -> dict[str, str]:
    """Return the attribute docstring of each field of a dataclass, by name."""
    found, name = {}, ""
    for node in tree(kind).body:
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
    """Return a table for each framework: its key, and mtrl's key or an instruction."""
    parts = []
    for framework, entries in FRAMEWORKS.items():
        rows = "".join(f"| `{theirs}` | {ours_of(ours)} |\n" for theirs, ours in entries.items())
        parts.append(f"### {framework}\n\n| there | here |\n|---|---|\n{rows}")
    tables = {**VALUES, **VALUES_OF_FOREIGN_KEY, **{key: {"false": ours} for key, ours in FOREIGN_WHEN_FALSE.items()}}
    values = "".join(
        f"| `{key}` | `{theirs}` | {cell(ours) if ours.startswith(('set ', 'leave ')) else f'`{ours}`'} |\n"
        for key, table_ in tables.items()
        for theirs, ours in table_.items()
    )
    return "\n".join([*parts, f"### Values\n\n| key | there | here |\n|---|---|---|\n{values}"])


def ours_of(ours: str) -> str:
    """Return a key in backticks, and a sentence unchanged."""
    return cell(ours) if " " in ours else f"`{ours}`"


@cache
def messages() -> str:
    """Return every message of a `UserError`, by the part of mtrl that raises it."""
    parts = []
    for folder in sorted(path for base in ("mtrl", "envs") for path in (ROOT / base).iterdir()):
        files = [folder] if folder.suffix == ".py" else sorted(folder.rglob("*.py"))
        said = list(dict.fromkeys(sentence for path in files for sentence in sentences(path)))
        if said:
            name = folder.relative_to(ROOT).with_suffix("")
            parts.append(f"### `{name}`\n\n" + "".join(f"- {sentence}\n" for sentence in said))
    return "\n".join(parts)


def sentences(path: Path) -> Iterator[str]:
    """Yield the messages of a file's `UserError`s, with … for variable parts."""
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            texts = {
                node.targets[0].id: template(node.value, {})
                for node in ast.walk(function)
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
            }
            raised = [
                node
                for node in ast.walk(function)
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "UserError" and node.args
            ]
            for node in sorted(raised, key=lambda node: node.lineno):
                text = " ".join(template(node.args[0], texts).split())
                if len(text.replace("…", "").split()) > 2:
                    yield quoted(text)


def template(node: ast.expr, texts: dict[str, str]) -> str:
    """Return a text of the code, with … for its variable parts."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part, texts) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return template(node.value, texts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left, texts) + template(node.right, texts)
    if isinstance(node, ast.Name):
        return texts.get(node.id) or "…"
    return "…"


def quoted(text: str) -> str:
    """Return the text as inline code, so that its characters are not read as markup."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def between(page: str, made: str) -> str:
    """Return the page with the text between the markers replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{made}\n{END}{after}"


def documents() -> dict[Path, str]:
    """Return the generated content of each document."""
    tables = {DOCS / "migration.md": names(), DOCS / "troubleshooting.md": messages()}
    return {
        DOCS / "configuration.md": configuration(),
        **{path: between(path.read_text(encoding="utf-8"), made) for path, made in tables.items()},
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
