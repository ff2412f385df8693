"""Fixtures that run `mtrl.play` with responses from a pipe, in a process of its own or, faster, in this process."""

import io
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mtrl.command.program import one_sentence
from mtrl.play.__main__ import main
from tests import forked
from tests.play.shown import ROOT, TASK


@pytest.fixture
def program(tmp_path):
    """Function `program("a response\\n", "key=value", …)` that returns the ended process of `mtrl play`."""

    def run(typed, *words):
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
        command = [sys.executable, "-m", "mtrl.play", *words]
        starts = subprocess if "PYTHONIOENCODING" in environment else forked  # Python reads it at its start
        done = starts.run(command, cwd=tmp_path, env=environment, input=typed, capture_output=True, timeout=120)
        done.stdout, done.stderr = done.stdout.decode(), done.stderr.decode()
        return done

    return run


@pytest.fixture
def play(tmp_path, monkeypatch, capsys):
    """The same function in this process; the text may be bytes, or None for a closed input."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.syspath_prepend(ROOT)

    def run(typed, *words):
        typed = typed.encode() if isinstance(typed, str) else typed
        stdin = None if typed is None else io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", stdin)
        try:
            with one_sentence():
                status = main(words)
        except SystemExit as ended:
            status = ended.code
        shown = capsys.readouterr()
        return SimpleNamespace(returncode=status, stdout=shown.out, stderr=shown.err)

    return run


@pytest.fixture
def awkward(play):
    """The task of awkward.py."""

    def run(typed, *words, family="FAMILY"):
        return play(typed, *TASK, f"environment.target=tests.play.awkward.{family}", *words)

    return run
