"""The benchmark of recipes runs a recipe with several settings. Times are not tested."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "benchmarks" / "recipe.py"


def run(*words):
    return subprocess.run([sys.executable, SCRIPT, *words], cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.fixture
def recipe(monkeypatch):
    """The benchmark as a module whose runs are forked; a run of its own is that of the test of a failed run."""

    def run(words, tree, folder):
        environment = os.environ | {"PYTHONPATH": str(tree)}
        done = forked.run(words, cwd=folder, env=environment, capture_output=True, text=True)
        return done.returncode, None, done.stderr[-2000:]

    monkeypatch.syspath_prepend(SCRIPT.parent)
    for name in ("recipe", "start"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("recipe")
    monkeypatch.setattr(module, "run", run)
    yield module
    for name in ("recipe", "start"):
        del sys.modules[name]


@pytest.mark.slow
def test_two_settings_of_a_recipe_are_compared(recipe, monkeypatch, capsys):
    fast = "debug=fast preflight.at_start=none diagnosis.live=none evaluation.every_steps=0"
    monkeypatch.chdir(ROOT)
    words = ["--steps", "2", "--rounds", "1", "--ways", fast, f"{fast} trainer.packing=true"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    recipe.main()
    first, second = (line for line in capsys.readouterr().out.splitlines() if "debug=fast" in line)
    assert first.count("|") == second.count("|") == 8
    assert "(x " not in first and second.count("(x ") == 6


def test_a_failed_run_ends_the_benchmark_with_the_error_of_the_run():
    done = run("--steps", "2", "--rounds", "1", "--ways", "trainer.max_step=1")
    assert done.returncode == 1 and "trainer.max_step=1" in done.stderr, done.stderr


def test_one_step_is_too_few():
    done = run("--steps", "1")
    assert done.returncode == 2 and "--steps must be at least 2" in done.stderr
