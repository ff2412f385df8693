"""A name with a leading underscore is read in its own file only: tests prove behaviour through public names.

A class may use the private names of its base class through `self`, `cls` and `super()`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("mtrl", "envs", "hydra_plugins")
"""Their private names are checked."""
READERS = (*PACKAGES, "tests", "benchmarks", "examples", "experiments", "scripts")

OF_OTHERS = {
    "_asdict": "method of every named tuple, documented by Python",
    "_fields": "attribute of every named tuple, documented by Python",
    "_make": "method of every named tuple, documented by Python",
    "_replace": "method of every named tuple, documented by Python",
    "os._exit": "function of Python that ends a process at once",
    "__import__('os')._exit": "the same function, as code of an attack calls it",
    "options._devices": "PyTorch has no public name for the options of a Gloo group",
    "options._timeout": "PyTorch has no public name for the options of a Gloo group",
    "get_submodule(owner)._parameters": "PyTorch has no public name that ties parameters",
}
"""Names of other projects that are also private names of mtrl, each with its reason: an attribute, or the end of the
expression that reads it."""

NAME = r"_[a-zA-Z]\w*"
DEFINED = re.compile(
    rf"^\s*(?:async def|def|class) ({NAME})|\b(?:self|cls)\.({NAME})|^\s*({NAME})\s*[:=]", re.MULTILINE
)
MAY_READ = re.compile(
    rf"(?<!\bself)(?<!\bcls)\.{NAME}|\bimport\b.*|^ +{NAME},$|[\"'](?:[\w.]+\.)?{NAME}[\"']", re.MULTILINE
)
BY_TEXT = {"setattr", "getattr", "delattr", "hasattr", "attrgetter", "patch", "object"}
"""Functions that take the name of an attribute as text."""


def defined_names(text: str) -> set[str]:
    """Every private name that a file defines, and every one that its classes use through `self` and `cls`."""
    return {name for found in DEFINED.findall(text) for name in found if name}


def is_own(owner: ast.expr) -> bool:
    """Whether an attribute is read through `self`, `cls` or `super()`."""
    name = owner.func if isinstance(owner, ast.Call) else owner
    return isinstance(name, ast.Name) and name.id in ("self", "cls", "super")


def private_reads(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Line, name and expression of every private name that is read from something else, as code or as text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.fullmatch(NAME, node.attr) and not is_own(node.value):
            yield node.lineno, node.attr, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            for name in node.names:
                if re.fullmatch(NAME, name.name):
                    yield node.lineno, name.name, f"{node.module}.{name.name}"
        elif isinstance(node, ast.Call):
            function = node.func
            called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            for each in node.args if called in BY_TEXT else ():
                text = each.value if isinstance(each, ast.Constant) else None
                if isinstance(text, str) and re.fullmatch(NAME, name := text.rpartition(".")[2]):
                    yield node.lineno, name, f"{called}({text!r})"


def foreign_reads(root: Path) -> list[str]:
    """Every read of a private name of `PACKAGES` below `root` in another file, with its place."""
    texts = {file: file.read_text(encoding="utf-8") for folder in READERS for file in (root / folder).rglob("*.py")}
    owners: dict[str, set[Path]] = {}
    for file, text in texts.items():
        if file.relative_to(root).parts[0] in PACKAGES:
            for name in defined_names(text):
                owners.setdefault(name, set()).add(file)
    found = []
    for file, text in texts.items():
        if not any(set(re.findall(rf"\b{NAME}", line)) & owners.keys() for line in MAY_READ.findall(text)):
            continue  # to parse every file would take seconds
        own = defined_names(text)
        for line, name, expression in private_reads(ast.parse(text)):
            if name in owners and name not in own and not any(expression.endswith(each) for each in OF_OTHERS):
                places = ", ".join(sorted(str(each.relative_to(root)) for each in owners[name])[:3])
                found.append(f"{file.relative_to(root)}:{line} reads {expression}, a private name of {places}")
    return sorted(found)


def test_private_names_are_read_in_their_own_file_only():
    assert foreign_reads(ROOT) == []


READS = {
    "an attribute": "import mtrl.one\nmtrl.one._two",
    "an import": "from mtrl.one import three, _two",
    "an import in several lines": "from mtrl.one import (\n    _two,\n    three,\n)",
    "a method": "from mtrl.one import Three\nThree()._four()",
    "an instance": "def read(three):\n    return three._five",
    "a patch of a module": "import mtrl.one\ndef patch(monkeypatch):\n    monkeypatch.setattr(mtrl.one, '_two', 1)",
    "a patch by a path": "def patch(monkeypatch):\n    monkeypatch.setattr('mtrl.one._two', 1)",
}
OTHERS = {
    "a name of its own": "_two = 3\nprint(_two)",
    "an attribute of its own": "class Own:\n    _four = 1\nprint(Own._four)",
    "a name of a base class": "from mtrl.one import Three\nclass Own(Three):\n    def six(self): return self._five",
    "a name of another project": "import os\nos._exit(0)",
    "a text": "print('_two', 'mtrl.one._two')",
}


@pytest.mark.parametrize("case", [*READS, *OTHERS])
def test_a_read_of_a_private_name_is_found(case, tmp_path):
    for folder in ("mtrl", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "mtrl" / "one.py").write_text(
        "_two = 2\ndef _exit(): ...\nclass Three:\n    def _four(self):\n        self._five = _two\n"
    )
    (tmp_path / "tests" / "test_one.py").write_text((READS | OTHERS)[case])
    found = foreign_reads(tmp_path)
    assert [place.partition(" ")[0].partition(":")[0] for place in found] == ["tests/test_one.py"] * (case in READS)
    assert all(place.endswith("mtrl/one.py") for place in found)
