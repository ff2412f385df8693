"""One small run for the tests of evaluations, and `mtrl evaluate` in this process."""

import contextlib
import fcntl
import os
import shutil
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest

from mtrl.command.compose import compose
from mtrl.command.program import one_sentence

TASK = [
    "experiment=gsm8k",
    "debug=fast",
    "reward=guide",
    "data.synthetic_test_rows=12",
    "data.max_test_rows=12",
    "model.tiny.hidden_size=64",
    "model.tiny.intermediate_size=128",
    "model.tiny.layers=2",
    "model.tiny.heads=2",
    "model.warm_start.demonstrations=128",
    "model.warm_start.check_every=40",
    "model.warm_start.batch_size=8",
    "model.warm_start.lr=5e-3",
    "model.warm_start.muon_lr=null",
    "generator.sampling_params.max_generate_length=24",
    "evaluation.rows=12",
    "evaluation.sampled_rows=6",
    "evaluation.samples_per_row=3",
]
"""Overrides of a policy that often writes the form of an answer, and sometimes the right answer."""


@pytest.fixture(scope="session")
def run():
    """The folder of a finished run of two steps. All workers of pytest-xdist share it, and tests only read it."""
    from mtrl.trainer.run import train

    folder = Path(os.environ["MTRL_CACHE"]).parent / "evaluated"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "small" / "summary.json").exists():
            shutil.rmtree(folder / "small", ignore_errors=True)
            quiet = ["tracker.plots=false", "preflight.at_start=none", "evaluation.before_train=false"]
            train(compose([*TASK, *quiet, f"run_dir={folder / 'small'}"]))
    return folder / "small"


@pytest.fixture(scope="session")
def compared(run, tmp_path_factory):
    """An evaluation of the run and of its start, with the plots of its report: the folder of the command, which holds
    its `out`, the words of the command and its outcome. Tests only read it."""
    folder = tmp_path_factory.mktemp("evaluations")
    words = (run, "evaluation.compare=[base]", "evaluation.pass_k_values=[1,3]")
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        return SimpleNamespace(folder=folder, words=words, done=command(*words, "evaluation.output=out"))


@pytest.fixture
def evaluate(tmp_path, monkeypatch):
    """Function `evaluate("key=value", …)` that runs the command in this process and returns its outcome. Its report has
    no plots, which take most of the time of a small evaluation; `compared` and test_evaluation_report.py have them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr("mtrl.evaluation.report_plots.draw_svg", lambda *arguments: "")
    return command


def command(*words):
    """Run `mtrl evaluate` in this process and return its status, output and errors."""
    from mtrl.evaluation.command import main

    out, err = StringIO(), StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            with one_sentence():
                status = main([str(word) for word in words])
        except SystemExit as ended:
            status = ended.code
    return SimpleNamespace(status=status, out=out.getvalue(), err=err.getvalue().strip())


@pytest.fixture
def refused(evaluate):
    """Function `refused("key=value", …)` that returns the one sentence of the error, which is all the output."""

    def sentence(*words):
        done = evaluate(*words)
        assert done.status == 2 and not done.out and "\n" not in done.err, (done.out, done.err)
        return done.err

    return sentence
