"""One word means one thing: no two classes of mtrl have the same name, and every program has one command."""

import ast
import re
from collections import defaultdict
from pathlib import Path

from mtrl.cli.commands import COMMANDS

ROOT = Path(__file__).parent.parent
MODULES = [command.module for command in COMMANDS.values() if isinstance(command.module, str)]
NAMED = re.compile(rf"python -m ({'|'.join(map(re.escape, MODULES))})\b(?!\.\w)")
EXPLAIN_BOTH = {"docs/quickstart.md", "mtrl/cli/command.py"}


def test_no_two_public_classes_have_the_same_name():
    places = defaultdict(list)
    for path in sorted((ROOT / "mtrl").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_documents_and_messages_name_the_command_of_a_program():
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "conf").rglob("*.yaml")]
    files += [path for folder in ("mtrl", "envs") for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in files if NAMED.search(path.read_text(encoding="utf-8"))}
    assert found == EXPLAIN_BOTH
