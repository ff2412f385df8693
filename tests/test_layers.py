"""The packages of mtrl are layers: a module imports only from its own package and from packages below it.

Every import statement counts: at module level, within a function, and for types only.
"""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "mtrl"

LAYERS = (
    "mtrl",  # the package itself: its version
    "types errors",
    "utils",
    "config",
    "datasets",
    "environments",
    "sandbox retrieval",
    "algorithms",
    "models",
    "distributed",
    "engines",
    "rewards mcp",
    "rollout",
    "scoring",
    "record",
    "console figures",
    "trackers",
    "command",
    "gateway",
    "agents",
    "diagnose",
    "trainer",
    "preflight",
    "evaluation play",
    "rescore",
    "doctor",
    "training",
    "sweep",
    "view",
    "main",
    "api evaluate track sft demonstrate sagemaker",
    "notebook",
    "cli",
    "entrypoints __main__",
)
"""From the lowest layer to the highest. Units of one line do not import each other. `__main__` also stands for the
entry point of each package, which no module imports."""
LEVEL = {unit: level for level, units in enumerate(LAYERS) for unit in units.split()}


def modules() -> dict[str, Path]:
    """Every module of mtrl and its file."""
    names = {}
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return names


def unit(module: str) -> str:
    """The package or file below mtrl that a module belongs to."""
    parts = module.split(".")
    return "__main__" if parts[-1] == "__main__" else parts[1] if len(parts) > 1 else parts[0]


def imports(file: Path, known: dict[str, Path]) -> Iterator[tuple[int, str]]:
    """Line and module of every import of mtrl in a file."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names if name.name.split(".")[0] == "mtrl")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are absolute"
            if (node.module or "").split(".")[0] == "mtrl":
                for name in node.names:
                    full = f"{node.module}.{name.name}"
                    yield node.lineno, full if full in known else str(node.module)


@pytest.fixture(scope="module")
def edges():
    known = modules()
    return [(module, line, found) for module, file in known.items() for line, found in imports(file, known)]


def test_every_unit_has_a_layer():
    assert {unit(module) for module in modules()} == set(LEVEL)


def test_every_import_finds_its_module(edges):
    known = modules()
    assert [f"{module}:{line} imports {found}" for module, line, found in edges if found not in known] == []


def test_no_import_climbs(edges):
    climbing = [
        f"{module}, line {line}: {unit(module)} imports {found} of {unit(found)}, which is not below it"
        for module, line, found in edges
        if unit(module) != unit(found) and LEVEL[unit(found)] >= LEVEL[unit(module)]
    ]
    assert climbing == []


def test_no_module_imports_an_entry_point(edges):
    assert [(module, line) for module, line, found in edges if unit(found) == "__main__"] == []


def test_no_cycle_of_packages(edges):
    graph: dict[str, set[str]] = {}
    for module, _, found in edges:
        if unit(module) != unit(found):
            graph.setdefault(unit(module), set()).add(unit(found))
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_no_cycle_of_modules(edges):
    graph: dict[str, set[str]] = {}
    for module, _, found in edges:
        if module != found:
            graph.setdefault(module, set()).add(found)
    TopologicalSorter(graph).prepare()  # raises CycleError


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """Nodes of a graph to which a path of at least one edge leads."""
    found: set[str] = set()
    todo = [*graph.get(start, ())]
    while todo:
        if (node := todo.pop()) not in found:
            found.add(node)
            todo += graph.get(node, ())
    return found


@pytest.mark.parametrize("package", sorted(path.parent.name for path in PACKAGE.glob("*/*/__init__.py")))
def test_a_package_within_a_package_is_in_no_cycle(package, edges):
    """Its nodes are the files and packages of the outer package, such as `trainer.data` in `trainer`."""
    outer, graph = next(path.parent.parent for path in PACKAGE.glob(f"*/{package}/__init__.py")).name, {}
    for module, _, found in edges:
        (_, one, *inner), (_, other, *imported) = f"{module}..".split(".")[:3], f"{found}..".split(".")[:3]
        if one == other == outer and inner != imported and inner != ["__main__"] and inner != [""]:
            graph.setdefault(inner[0], set()).add(imported[0])
    assert package not in reachable(graph, package)


def imports_at_start(file: Path, known: dict[str, Path]) -> set[str]:
    """Modules that are imported when the module of a file is imported, with their packages."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            full = (f"{node.module}.{name.name}" for name in node.names)
            found |= {name if name in known else str(node.module) for name in full}
    parts = [name.split(".") for name in found]
    return {".".join(part[:end]) for part in parts for end in range(1, len(part) + 1)} & known.keys()


def test_every_module_can_be_imported_first():
    """An import cycle fails or not depending on which of its modules is imported first."""
    known = modules()
    graph = {
        module: {found for found in imports_at_start(file, known) if not f"{module}.".startswith(f"{found}.")}
        for module, file in known.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_the_architecture_lists_the_packages_in_this_order():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    tree = page.partition("\nmtrl/ ")[2].partition("\nenvs/ ")[0]
    columns = [re.split(r"\s{2,}", line.strip())[0] for line in tree.splitlines()[1:]]
    listed = [re.sub(r"/$|\.py$", "", name) for column in columns for name in column.split()]
    packages = {name for name in LEVEL if (PACKAGE / name).is_dir()} - {"entrypoints", "mtrl"}
    assert packages <= set(listed)
    below_programs = [LEVEL[name] for name in listed if name in packages - {"cli", "sagemaker"}]
    assert below_programs == sorted(below_programs)
