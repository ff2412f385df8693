"""The benchmark of recipes runs a recipe with several settings. Times are not tested."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "benchmarks" / "recipe.py"


def run(*words):
    return subprocess.run([sys.executable, SCRIPT, *words], cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_two_settings_of_a_recipe_are_compared():
    done = run("--steps", "2", "--rounds", "1", "--ways", "debug=fast", "debug=fast trainer.packing=true")
    assert done.returncode == 0, done.stderr
    first, second = (line for line in done.stdout.splitlines() if "debug=fast" in line)
    assert first.count("|") == second.count("|") == 8
    assert "(x " not in first and second.count("(x ") == 6


def test_a_failed_run_ends_the_benchmark_with_the_error_of_the_run():
    done = run("--steps", "2", "--rounds", "1", "--ways", "trainer.max_step=1")
    assert done.returncode == 1 and "trainer.max_step=1" in done.stderr, done.stderr


def test_one_step_is_too_few():
    done = run("--steps", "1")
    assert done.returncode == 2 and "--steps must be at least 2" in done.stderr
