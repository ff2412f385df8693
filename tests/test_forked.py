"""Forked programs equal started ones in output, files and exit code, and inherit no state of the server."""

import os
import signal
import subprocess
import sys

import pytest

from tests import forked
from tests.forked import ROOT
from tests.trainer.runs import QUIET, rows_of, weights_of

LOOK = """
import atexit, os, sys, threading, random, signal, time
print(sys.argv, sys.path[:2], os.getcwd(), sorted(os.environ), os.getsid(0) == os.getpid())
print(__name__, sys.modules["__main__"].__dict__ is globals(), threading.active_count(), time.tzname)
print([signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)])
print(input(), sys.stdout.isatty(), sys.stdout.line_buffering, sys.stderr.line_buffering, sys.stdout.encoding)
atexit.register(print, "at exit", file=sys.stderr)
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
sys.exit(int(sys.argv[1]) if sys.argv[1].isdecimal() else sys.argv[1])
"""


def both(words, folder, **settings):
    """Run the program with `subprocess` and forked, and return both results."""
    settings = {"cwd": folder, "capture_output": True, "text": True, "timeout": 300} | settings
    return [starts.run([sys.executable, *words], **settings) for starts in (subprocess, forked)]


def shown(done):
    return done.returncode, done.stdout, done.stderr


def environment(**more):
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


@pytest.mark.parametrize(
    ("kind", "word"),
    [("code", "0"), ("code", "75"), ("code", "300"), ("code", "words of an error"), ("script", "75"), ("module", "75")],
)
def test_a_forked_program_equals_the_started_one(tmp_path, kind, word):
    (tmp_path / "looks.py").write_text(LOOK)
    words = {"code": ["-c", LOOK], "script": ["looks.py"], "module": ["-m", "looks"]}[kind]
    env = environment(PYTHONPATH=str(tmp_path), TZ="Asia/Tokyo")
    started, copy = both([*words, word], tmp_path, input="typed\n", env=env, start_new_session=word == "0")
    assert shown(copy) == shown(started)
    assert "typed" in started.stdout and started.returncode == {"0": 0, "75": 75, "300": 44}.get(word, 1)


def test_a_forked_error_has_its_traceback(tmp_path):
    started, copy = both(["-c", "def f(): raise KeyError('a')\nf()"], tmp_path)
    assert copy.returncode == started.returncode == 1 and copy.stdout == ""
    assert copy.stderr.splitlines()[-1] == started.stderr.splitlines()[-1] == "KeyError: 'a'"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_signals_end_a_forked_program(number):
    words = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(600)"]
    ends = []
    for starts in (subprocess, forked):
        with starts.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout.readline() == "here\n" and process.poll() is None
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.01)
            process.send_signal(number)
            ends.append(process.wait(60))
    assert ends == [-number, -number]


def test_modules_are_imported_and_no_other_state_is_inherited(monkeypatch, tmp_path):
    code = """
    import sys
    assert {"torch", "transformers", "hydra", "matplotlib"} <= sys.modules.keys() and "pytest" not in sys.modules
    import random, numpy, torch
    from hydra.core.global_hydra import GlobalHydra
    assert not GlobalHydra.instance().is_initialized()
    print(random.random(), numpy.random.rand(), torch.initial_seed(), torch.get_num_threads())
    """
    monkeypatch.chdir(tmp_path)
    words = [sys.executable, "-c", "\n".join(line.strip() for line in code.splitlines())]
    outputs = [forked.run(words, check=True, capture_output=True, text=True).stdout.split() for _ in range(2)]
    assert outputs[0][:2] != outputs[1][:2] and outputs[0][2:] == outputs[1][2:]


def test_settings_that_python_reads_at_its_start_are_refused():
    for command, env in ((["true"], None), ([sys.executable, "-c", ""], environment(PYTHONHASHSEED="7"))):
        with pytest.raises(ValueError, match="only subprocess"):
            forked.Popen(command, env=env)


@pytest.mark.slow
@pytest.mark.ci
def test_a_forked_run_equals_a_started_one(tmp_path):
    """The first command of the README, with a small configuration, gives equal metrics, weights and output."""
    words = ["-m", "mtrl.main", "debug=fast", "run_dir=run", *QUIET, "model.warm_start.demonstrations=8"]
    runs = []
    for starts in (subprocess, forked):
        folder = tmp_path / starts.__name__
        folder.mkdir()
        done = starts.run(
            [sys.executable, *words],
            cwd=folder,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        runs.append((done, folder / "run"))
    (started, first), (copy, second) = runs
    assert rows_of(first) == rows_of(second) and weights_of(first) == weights_of(second)
    assert len(rows_of(first)) == 3
    assert len(started.stdout.splitlines()) == len(copy.stdout.splitlines()) > 20
    assert started.stdout.splitlines()[-1] == copy.stdout.splitlines()[-1]


def test_a_user_error_is_the_same_sentence(tmp_path):
    started, copy = both(["-m", "mtrl.main", "algorithm.group_sise=3"], tmp_path, env=environment())
    assert shown(copy) == shown(started)
    assert started.returncode == 2 and "algorithm.group_size" in started.stderr
