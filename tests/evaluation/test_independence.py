"""Invariant 7: a scorer shares no parsing code with the reward. Two checks: of all direct and indirect imports,
and of the functions that run for the reward and for the score of an episode."""

import ast
import asyncio
import functools
import importlib
import inspect
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

import mtrl
from mtrl.config.schema import DataConfig
from mtrl.environments.family import BUILT_IN, get_family
from tests.envs.episodes import trajectory_of

ROOT = Path(mtrl.__file__).parent.parent
NEUTRAL = {"mtrl.types", "mtrl.errors", "mtrl.utils.process", "mtrl.utils.process_guard"}
"""Modules of types and errors, which parse no text of a model."""
EXECUTOR = "mtrl.sandbox."
"""Module in which SQL and commands of both sides of `RUNNING` run; each side has parsed them by itself."""
RUNNING = ("text_to_sql", "mini_swe")


# -- imports ---------------------------------------------------------------------------------------------------------


def file_of(module, root):
    """Return the file of a module, None if it is not in this tree."""
    path = root / module.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def imports_of(module, root):
    """Return the modules of this tree that a module imports: at the top, in functions, or by `import_module`."""
    file = file_of(module, root)
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    plain, parts = written_imports(file.read_text(encoding="utf-8"), package)
    found = set(plain)
    for base, names in parts:
        modules = {name for name in names if file_of(name, root)}
        found |= modules if modules == names else {*modules, base}
    return {name for name in found if file_of(name, root)}


@functools.cache
def written_imports(text, package):
    """What a source imports by whole names, and pairs of a package and the names that are imported from it."""
    plain, parts = set(), []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            plain |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(filter(None, (above, node.module)))
            parts.append((base, {f"{base}.{alias.name}" for alias in node.names}))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            plain |= {argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)}
    return plain, parts


def reach(modules, root=ROOT):
    """Return these modules and all their direct and indirect imports."""
    found, todo = set(), set(modules)
    while todo:
        module = todo.pop()
        found.add(module)
        todo |= imports_of(module, root) - found
    return found


def defined_in(function):
    """Return the module with the code of a function, which may be wrapped or partial."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.unwrap(function).__module__


def sides(name):
    """Return the modules of the scorer of a family, and those of its environment and its rewards."""
    family, package = get_family(name), BUILT_IN[name]
    paid = {defined_in(family.environment)}
    paid |= {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / package.replace(".", "/")).rglob("*.py")
        if path.stem in ("reward", "environment", "grading") or path.parent.name == "rewards"
    }
    return {defined_in(family.score)}, {module.removesuffix(".__init__") for module in paid}


def is_harmless(module, name):
    """Whether scorer and reward of this family may both use the module."""
    return module in NEUTRAL or (name in RUNNING and module.startswith(EXECUTOR))


def shared(name, root=ROOT):
    """Return the modules that both sides of a family import and that could parse text of a model."""
    scored, paid = sides(name)
    return {module for module in reach(scored, root) & reach(paid, root) if not is_harmless(module, name)}


@pytest.mark.parametrize("name", BUILT_IN)
def test_scorer_and_reward_import_nothing_in_common(name):
    scored, paid = sides(name)
    assert not shared(name)
    assert {module for module in reach(scored) if module.startswith("envs.")} == scored
    assert f"envs.{name}.environment" in reach(paid)


@pytest.mark.parametrize("name", RUNNING)
def test_the_exception_is_needed(name):
    scored, paid = sides(name)
    assert any(module.startswith(EXECUTOR) for module in reach(scored) & reach(paid))


PLANTED = {
    "at the top": "from envs.{name}.{module} import {attribute}",
    "in a function": "def late():\n    from envs.{name}.{module} import {attribute}",
    "under another name": "import envs.{name}.{module} as other",
    "relatively": "from .{module} import {attribute}",
    "as a module": "from . import {module}",
    "through a third module": "from helpers.through import {attribute}",
    "by its name": "import importlib\nother = importlib.import_module('envs.{name}.{module}')",
}


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("how", PLANTED)
def test_a_planted_import_is_found(name, how, tmp_path):
    """The import is planted in a copy of the tree, for each family and each way to reach the code of the reward."""
    scored, paid = sides(name)
    (scorer,) = scored
    module = f"envs.{name}.environment"
    attribute = get_family(name).environment.__name__
    copy_sources(reach(scored | paid), tmp_path)
    (tmp_path / "helpers").mkdir()
    (tmp_path / "helpers" / "through.py").write_text(f"from {module} import {attribute}\n")
    planted = PLANTED[how].format(name=name, module="environment", attribute=attribute)
    file = tmp_path / file_of(scorer, ROOT).relative_to(ROOT)
    assert not shared(name, tmp_path)
    file.write_text(f"{file.read_text(encoding='utf-8')}\n\n{planted}\n", encoding="utf-8")
    assert module in shared(name, tmp_path)


def copy_sources(modules, folder):
    for module in modules:
        source = file_of(module, ROOT)
        target = folder / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")


# -- functions that run ----------------------------------------------------------------------------------------------

SETTINGS = {"gsm8k": {"calculator": True}, "sop": {"domain": "aircraft_inspection"}}
"""environment.config of the families whose shipped experiment has settings of the environment."""


@contextmanager
def functions_run():
    """Record the functions of this tree that are called in any thread: `(module, name)`."""
    found = set()

    def note(frame, event, argument):
        if event == "call" and (module := frame.f_globals.get("__name__", "")).startswith(("envs.", "mtrl.")):
            found.add((module, frame.f_code.co_qualname))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


async def run(family, row, responses, **settings):
    """Return the reward of an episode of these responses."""
    environment = family.environment(**settings)
    try:
        opening = environment.reset(row)
        if inspect.isawaitable(opening):
            await opening
        paid = 0.0
        for response in responses:
            result = environment.step(response, row["ground_truth"])
            paid += (await result if inspect.isawaitable(result) else result).reward
        return paid
    finally:
        environment.close()


def run_in_common(family, row, responses, **settings):
    """Return the functions that run for both reward and score of these responses, the reward and the score."""
    with functions_run() as paying:
        reward = asyncio.run(run(family, row, responses, **settings))
    with functions_run() as scoring:
        score = family.score(trajectory_of(responses), row)
        family.measure(trajectory_of(responses), row)
    assert {(defined_in(family.score), name) for name in ("score", "measure")} <= scoring and paying
    return paying & scoring, reward, score


@pytest.mark.parametrize("name", BUILT_IN)
def test_reward_and_scorer_run_no_function_in_common(name):
    family = get_family(name)
    settings = SETTINGS.get(name, {})
    data = DataConfig(synthetic_train_rows=16, synthetic_test_rows=8)
    row = family.load(data, 0, **settings).train[0]
    both, reward, score = run_in_common(family, row, family.gold(row), max_turns=6, **settings)
    assert score == 1.0 and reward > 0
    assert not {(module, function) for module, function in both if not is_harmless(module, name)}


def test_a_scorer_that_calls_the_parser_of_the_reward_is_detected(monkeypatch):
    """The function is passed without an import, so only a run reveals it."""
    reward = importlib.import_module("envs.gsm8k.reward")
    scorer = importlib.import_module("envs.gsm8k.scorer")
    monkeypatch.setattr(scorer, "Decimal", lambda number: reward.parse_answer(f"#### {number}"))
    family = get_family("gsm8k")
    row = {"prompt": [], "ground_truth": {"answer": "72"}}
    both, reward, score = run_in_common(family, row, ["#### 72"])
    assert score == reward == 1.0
    assert ("envs.gsm8k.reward", "parse_answer") in both
