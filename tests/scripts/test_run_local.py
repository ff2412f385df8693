"""scripts/run_local.sh: its command for each number of GPUs, and a run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "scripts" / "run_local.sh"
RANKED = "-m torch.distributed.run --standalone --nproc-per-node"


def started(*words, folder=None, **more):
    environment = {"PATH": os.environ["PATH"], "PYTHON": "echo", "CUDA_VISIBLE_DEVICES": "", **more}
    done = subprocess.run([SCRIPT, *words], env=environment, capture_output=True, text=True, cwd=folder, timeout=120)
    return done.returncode, done.stdout.strip() or done.stderr.strip()


@pytest.mark.parametrize(
    ("words", "devices", "command"),
    [
        (["seed=1", "name=a b"], "", "-m mtrl.main seed=1 name=a b"),
        (["seed=1"], "-1", "-m mtrl.main seed=1"),
        (["seed=1"], "3", "-m mtrl.main seed=1"),
        (["seed=1"], "0,1,5", f"{RANKED} 3 -m mtrl.main seed=1"),
        (["seed=1"], "0,1,-1,5", f"{RANKED} 2 -m mtrl.main seed=1"),
        (["-n", "2", "seed=1"], "", f"{RANKED} 2 -m mtrl.main seed=1"),
        (["-m", "seed=1,2"], "0,1", "-m mtrl.main -m seed=1,2"),
        (["sweep=seeds"], "0,1", "-m mtrl.main sweep=seeds"),
        (["+sweep=seeds"], "0,1", "-m mtrl.main +sweep=seeds"),
        (["++sweep=seeds"], "0,1", "-m mtrl.main ++sweep=seeds"),
        (["--multi", "seed=1,2"], "0,1", "-m mtrl.main --multi seed=1,2"),
        (["sweep=null"], "0,1", f"{RANKED} 2 -m mtrl.main sweep=null"),
        (["-n", "1", "-m", "seed=1,2"], "0,1", "-m mtrl.main -m seed=1,2"),
        (["--cfg", "job"], "", "-m mtrl.main --cfg job"),
    ],
)
def test_the_started_command(words, devices, command):
    assert started(*words, CUDA_VISIBLE_DEVICES=devices) == (0, command)


def test_wrong_options_start_no_run():
    for number in ("two", "0", "-1", "1" + 20 * "0"):
        said = f"run_local.sh: -n {number} is no whole number above 0; write for example -n 8"
        assert started("-n", number) == (2, said)
    assert started("-l") == (2, "run_local.sh: -l needs a value")
    said = "run_local.sh: -n 2 is for one run; jobs of a sweep are one process each"
    assert started("-n", "2", "-m", "seed=1,2") == (2, said)
    assert started("-b", "-l", "none/log") == (2, "run_local.sh: -l none/log cannot be written; name another file")


def test_gpus_are_counted(tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: x)'\necho 'GPU 1: A (UUID: y)'\n")
    smi.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": "echo"}
    done = subprocess.run([SCRIPT, "seed=1"], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == f"{RANKED} 2 -m mtrl.main seed=1"


def test_the_status_is_that_of_the_run(tmp_path):
    assert started("a", folder=tmp_path, PYTHON="false")[0] == 1
    assert started("-l", "log", "a", folder=tmp_path, PYTHON="false")[0] == 1


def test_a_log_is_added_to(tmp_path):
    for word in ("one", "two"):
        assert started("-l", "log", word, folder=tmp_path) == (0, f"-m mtrl.main {word}")
    assert (tmp_path / "log").read_text() == "-m mtrl.main one\n-m mtrl.main two\n"


@pytest.mark.parametrize("send", [os.killpg, os.kill], ids=["group", "process"])
def test_the_output_after_a_signal_is_logged(tmp_path, send):
    """A signal to the group, like Ctrl-C, also reaches the program of the log; one to the script reaches the run."""
    run = tmp_path / "run"
    run.write_text("#!/bin/sh\ntrap 'echo saved; exit 75' TERM\necho begun\nwhile :; do sleep 0.1; done\n")
    run.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(run), "CUDA_VISIBLE_DEVICES": ""}
    started = {"stdout": subprocess.PIPE, "text": True, "cwd": tmp_path, "start_new_session": True}
    with subprocess.Popen([SCRIPT, "-l", "log", "a"], env=environment, **started) as process:
        try:
            assert process.stdout.readline() == "begun\n"
            send(process.pid, signal.SIGTERM)
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 75 and output.endswith("saved\n")
    assert (tmp_path / "log").read_text() == f"begun\n{output}"


def test_ranks_have_time_to_save(tmp_path):
    waits = tmp_path / "python"
    waits.write_text('#!/bin/sh\necho "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT"\n')
    waits.chmod(0o755)
    assert started("-n", "2", PYTHON=str(waits)) == (0, "600")
    assert started("-n", "2", PYTHON=str(waits), TORCH_ELASTIC_SHUTDOWN_TIMEOUT="5") == (0, "5")


def test_in_the_background(tmp_path):
    """The error of a refused command is in the log."""
    words = ("-b", "-l", "log", "algorithm.group_size=1")
    status, said = started(*words, folder=tmp_path, PYTHON=sys.executable, PYTHONPATH=str(ROOT))
    assert status == 0 and said.startswith("process ") and "writes to log" in said
    process = int(said.split()[1].rstrip(":"))
    for _ in range(600):
        if not Path(f"/proc/{process}").exists():
            break
        time.sleep(0.1)
    assert "algorithm.group_size=1 gives" in (tmp_path / "log").read_text()
