"""Hostile code of a task outside of its episodes, each in its own run: import, loader, scorer, reward.

The run ends with a sentence and a nonzero status, and never hangs.
"""

import os
import subprocess
import sys

import pytest
from attack_kit import ROOT

from tests import forked

MODULE = """
import math, os, threading
from types import SimpleNamespace
from mtrl.environments.base import BaseEnvironment
from mtrl.environments.family import Splits

def attack(where, value):
    if where == os.environ["WHERE"] and (where != "score" or os.path.exists(os.environ["RUN"] + "/status.txt")):
        open(os.environ["RUN"] + ".attack", "w").close()
        return {code}
    return value

attack("import", None)

def reward(messages, row):
    return attack("reward", 0.5)

class Bad(BaseEnvironment):
    def step(self, response, ground_truth):
        return len(set(response)) / 9, None, True

    @staticmethod
    def load(data, seed, **config):
        attack("load", None)
        rows = [dict(id=str(i), prompt=[dict(role="user", content=f"row {{i}}")], ground_truth={{}}) for i in range(40)]
        return Splits(rows[:30], rows[30:])

    @staticmethod
    def score(trajectory, row):
        return attack("score", 1.0)

    @staticmethod
    def demonstrate(row, rng):
        return SimpleNamespace(act=lambda observation: "hello")
"""
WORDS = [
    "debug=fast", "environment.target=bad.Bad", "name=bad", "environment.config={}", "reward=default",
    "reward.components.mine={weight: 1.0, target: bad.reward}", "tracker.plots=false", "evaluation.before_train=false",
    "preflight.at_start=none", "diagnosis.live=none",
]  # fmt: skip
EXIT, HANG = "os._exit(0)", "threading.Event().wait(600)"
SECONDS = {"load hangs": 1, "score hangs": 3}
"""Time limits of the tasks that reach one; the second task runs all its episodes."""
LATE = "took longer than environment.episode_timeout={} s"
CASES = {
    # name: (place, code, exit status, part of the output)
    "import exits": ("import", EXIT, 2, "environment.target=bad.Bad cannot be imported (RuntimeError in bad.py, line"),
    "load hangs": (
        "load",
        HANG,
        2,
        f"loading the rows of Bad {LATE.format(1)}; fix the loader or its data, or raise it",
    ),
    "score exits": (
        "score",
        EXIT,
        2,
        "failed: RuntimeError: SystemExit('os._exit(0) in an environment'); fix `score`",
    ),
    "score hangs": ("score", HANG, 2, f"{LATE.format(3)}; fix `score`, or raise it"),
    "score is NaN": ("score", "math.nan", 2, "failed: TypeError: it returned nan; it must be a finite number"),
    "reward exits": ("reward", EXIT, 2, "RuntimeError: SystemExit('os._exit(0) in an environment')"),
    "metrics are huge": ("reward", "(0.5, {'m': 1e308})", 2, "mine returned metrics['m'] = 1e+308; it must be"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_reports_what_ended_it(name, tmp_path):
    where, code, expected, sentence = CASES[name]
    (tmp_path / "bad.py").write_text(MODULE.format(code=code))
    run = str(tmp_path / "run")
    limits = [f"environment.{key}={SECONDS.get(name, 6)}" for key in ("episode_timeout", "step_timeout")]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "OMP_NUM_THREADS": "1"}
    done = forked.run(
        [sys.executable, "-m", "mtrl.main", *WORDS, *limits, f"run_dir={run}"],
        env=environment | {"RUN": run, "WHERE": where},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert (tmp_path / "run.attack").exists(), done.stdout
    assert done.returncode == expected and sentence in done.stdout, done.stdout
    assert expected == 1 or "Traceback" not in done.stdout, done.stdout
