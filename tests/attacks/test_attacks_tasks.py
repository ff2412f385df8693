"""Hostile code of a task around its episodes, each in a run of its own: import, loader, scorer, reward.

No such code ends the run without a sentence, or with status 0, or holds it up for ever.
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

def does(where, value):
    if where == os.environ["WHERE"] and (where != "score" or os.path.exists(os.environ["RUN"] + "/status.txt")):
        open(os.environ["RUN"] + ".deed", "w").close()
        return {deed}
    return value

does("import", None)

def pay(messages, row):
    return does("reward", 0.5)

class Bad(BaseEnvironment):
    def step(self, response, ground_truth):
        return len(set(response)) / 9, None, True

    @staticmethod
    def load(data, seed, **config):
        does("load", None)
        rows = [dict(id=str(i), prompt=[dict(role="user", content=f"row {{i}}")], ground_truth={{}}) for i in range(40)]
        return Splits(rows[:30], rows[30:])

    @staticmethod
    def score(trajectory, row):
        return does("score", 1.0)

    @staticmethod
    def demonstrate(row, rng):
        return SimpleNamespace(act=lambda observation: "hello")
"""
WORDS = [
    "debug=fast", "environment.target=bad.Bad", "name=bad", "environment.config={}", "reward=default",
    "reward.components.mine={weight: 1.0, target: bad.pay}", "tracker.plots=false", "evaluation.before_train=false",
    "environment.episode_timeout=6", "environment.step_timeout=6",
]  # fmt: skip
EXIT, HANG = "os._exit(0)", "threading.Event().wait(600)"
LATE = "took longer than environment.episode_timeout=6 s"
DEEDS = {
    # where, deed, exit status, a part of what is said
    "import exits": ("import", EXIT, 2, "environment.target=bad.Bad cannot be imported (RuntimeError in bad.py, line"),
    "load exits": ("load", EXIT, 2, "loading the rows of Bad failed: SystemExit in bad.py, line"),
    "load hangs": ("load", HANG, 2, f"loading the rows of Bad {LATE}; mend the loader or its data, or raise it"),
    "score exits": (
        "score",
        EXIT,
        2,
        "failed: RuntimeError: SystemExit('os._exit(0) in an environment'); mend `score`",
    ),
    "score hangs": ("score", HANG, 2, f"{LATE}; mend `score`, or raise it"),
    "score is NaN": ("score", "math.nan", 2, "failed: TypeError: it returned nan; it must be a finite number"),
    "score is huge": ("score", "1e308", 2, "failed: TypeError: it returned 1e+308; it must be a finite number"),
    "reward exits": ("reward", EXIT, 1, "RuntimeError: SystemExit('os._exit(0) in an environment')"),
    "metrics are huge": ("reward", "(0.5, {'m': 1e308})", 2, "mine returned metrics['m'] = 1e+308; it must be"),
}


@pytest.mark.parametrize("name", DEEDS)
def test_a_run_reports_what_ended_it(name, tmp_path):
    where, deed, expected, sentence = DEEDS[name]
    (tmp_path / "bad.py").write_text(MODULE.format(deed=deed))
    run = str(tmp_path / "run")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "OMP_NUM_THREADS": "1"}
    done = forked.run(
        [sys.executable, "-m", "mtrl.main", *WORDS, f"run_dir={run}"],
        env=environment | {"RUN": run, "WHERE": where},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert (tmp_path / "run.deed").exists(), done.stdout
    assert done.returncode == expected and sentence in done.stdout, done.stdout
    assert expected == 1 or "Traceback" not in done.stdout, done.stdout
