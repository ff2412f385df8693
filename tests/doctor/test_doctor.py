"""The doctor: its findings on machines with and without faults."""

import json
import os
import subprocess
import sys
import threading
import time
from importlib import metadata
from pathlib import Path

import pytest

from mtrl.doctor import __main__ as doctor
from mtrl.doctor import checks, machine
from mtrl.doctor.advice import advise
from mtrl.doctor.checklist import CHECKS, ESSENTIAL, run
from mtrl.doctor.machine import Torch, cuda_fits
from mtrl.doctor.packages import BASE, look, sort
from mtrl.errors import UserError
from mtrl.preflight.result import CheckResult, failed, passed, warned
from tests import forked

ROOT = Path(__file__).parent.parent.parent
GIB = 2**30
CPU = Torch("2.13.0+cpu", None, ())
H100 = Torch("2.13.0", "12.8", (("NVIDIA H100", 79 * GIB),))


@pytest.fixture(autouse=True)
def asked_anew():
    machine.ask_torch.cache_clear()


@pytest.fixture
def torch_says(monkeypatch):
    def say(found, driver=None):
        monkeypatch.setattr(machine, "ask_torch", lambda: found)
        monkeypatch.setattr(machine, "driver_cuda", lambda: driver)

    return say


def shown(capsys):
    return " ".join(capsys.readouterr().out.split())


def only(monkeypatch, **chosen):
    """Run the doctor with these checks."""
    monkeypatch.setattr(doctor, "CHECKS", chosen)


def test_it_runs_here_as_a_program_and_leaves_nothing(tmp_path):
    """All checks but the smoke run are real."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MTRL_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "mtrl.doctor", "--no-smoke", "--json"]
    done = forked.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    told = json.loads(done.stdout)
    assert [check["name"] for check in told["checks"]] == [*CHECKS]
    assert done.returncode == int(told["status"] == "fail") == 0, done.stdout
    assert all(check["fix"] for check in told["checks"] if check["status"] in ("warn", "fail"))
    assert told["can"][0]["command"].startswith("mtrl train")
    assert not [*tmp_path.iterdir()]


def test_the_screen_ends_with_commands(monkeypatch, torch_says, capsys):
    torch_says(CPU)
    only(monkeypatch, python=checks.python, sandbox=lambda: warned("no bwrap", "apt-get install bubblewrap"))
    assert doctor.main(["--no-smoke"]) == 0, "a sandbox is not what the default experiment needs"
    text = shown(capsys)
    assert "→ apt-get install bubblewrap" in text and text.endswith("generator.backend=vllm")
    assert "mtrl train see what a real model would need: mtrl doctor --plan" in text


def test_missing_essentials_fail_the_doctor(monkeypatch, capsys):
    only(monkeypatch, python=lambda: failed("Python 3.9", "make an environment with Python 3.11"))
    monkeypatch.setattr(doctor, "smoke", lambda: pytest.fail("nothing can be trained where something has failed"))
    assert doctor.main([]) == 1
    assert shown(capsys).endswith("the default experiment cannot run here: fix what failed first")


def test_a_smoke_run_that_fails_fails_it(monkeypatch, capsys):
    only(monkeypatch, python=checks.python)
    monkeypatch.setattr(doctor, "smoke", lambda: failed("it failed", "look"))
    assert doctor.main(["--json"]) == 1
    assert json.loads(capsys.readouterr().out)["checks"][-1]["name"] == "smoke run"


@pytest.mark.slow
def test_the_smoke_run_trains(monkeypatch):
    monkeypatch.setattr(subprocess, "run", forked.run)
    found = checks.smoke()
    assert found.status == "pass" and found.evidence.startswith("2 steps of the tiny policy"), found


def test_a_smoke_run_that_hangs_ends():
    found = checks.smoke(seconds=0.2)
    assert found.status == "fail" and "did not end within 0.2 seconds" in found.evidence and found.fix


def test_a_smoke_run_that_breaks_says_why(monkeypatch):
    monkeypatch.setattr(checks, "SMOKE_COMMAND", ("no.such=key",))
    found = checks.smoke()
    assert found.status == "fail" and "no.such" in found.evidence


def test_a_check_that_hangs_or_breaks_is_left_behind():
    release = threading.Event()
    chosen = {"torch": lambda: release.wait() and passed(""), "git": lambda: 1 / 0, "aws": lambda: passed("there")}
    start = time.monotonic()
    hanging, broken, good = run(chosen, seconds=0.2)
    assert time.monotonic() - start < 60
    assert (hanging.status, broken.status, good.status) == ("fail", "warn", "pass")
    assert "did not answer within 0.2 seconds" in hanging.evidence and "ZeroDivisionError" in broken.evidence
    release.set()


def test_only_essential_checks_can_fail(monkeypatch):
    """Whatever is wrong with the other checks, the default experiment runs."""
    monkeypatch.setattr(machine, "ask_torch", lambda: CPU)
    monkeypatch.setattr(Path, "home", lambda: 1 / 0)
    monkeypatch.setenv("PATH", "/nonexistent")
    others = {name: check for name, check in CHECKS.items() if name not in ESSENTIAL}
    assert "fail" not in {result.status for result in run(others)}


@pytest.mark.parametrize(
    ("torch", "driver", "status", "said"),
    [
        (CPU, None, "pass", "built for CPUs"),
        (H100, "12.4", "pass", "driver up to CUDA 12.4"),
        (CPU, "12.4", "warn", "while there is an NVIDIA driver"),
        (Torch("2.13.0", "13.0", ()), "12.4", "warn", "the driver runs CUDA 12.4 at most"),
        (Torch("2.13.0", "12.8", ()), "12.4", "warn", "it finds no GPU"),
    ],
)
def test_torch_and_the_driver(torch, driver, status, said, torch_says):
    torch_says(torch, driver)
    found = checks.torch()
    assert (found.status, bool(found.fix)) == (status, status == "warn") and said in found.evidence


def test_cuda_versions():
    assert cuda_fits("12.8", "12.4") and cuda_fits("12.8", "13.0") and not cuda_fits("13.0", "12.9")


def test_torch_that_does_not_import_or_answer(tmp_path, monkeypatch):
    """The program that is asked finds another `torch` before the installed one."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "torch.py").write_text("import no_such_module")
    assert "No module named 'no_such_module'" in checks.torch().evidence
    (tmp_path / "torch.py").write_text("import time; time.sleep(60)")
    with pytest.raises(RuntimeError, match="did not answer within 0.5 seconds"):
        machine.ask_torch(0.5)


def test_requirements_are_sorted_by_extra():
    lines = ["numpy<3,>=2", "datasets>=4; extra == 'data'", 'pyarrow>=18; extra == "data"', "x; python_version<'3'"]
    by_extra = sort(lines)
    assert [r.name for r in by_extra[BASE]] == ["numpy"]
    assert [r.name for r in by_extra["data"]] == ["datasets", "pyarrow"]
    (found,) = look(by_extra[BASE])
    assert found.fits and found.version == metadata.version("numpy")


def test_packages_out_of_their_range_are_named(monkeypatch):
    monkeypatch.setattr(checks, "wanted", lambda: sort(["numpy<1", "rich>=13", "rich>99; extra == 'shiny'"]))
    base, extra = checks.packages(), checks.extras()
    assert base.status == "fail" and f"numpy {metadata.version('numpy')}, required <1" in base.evidence
    assert extra.status == "warn" and "pip install -e '.[shiny]'" in extra.fix


def test_disk_that_is_full_or_cannot_be_written(monkeypatch, tmp_path):
    monkeypatch.setenv("MTRL_CACHE", str(tmp_path / "a" / "b"))
    usage = type(checks.shutil.disk_usage(tmp_path))
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: usage(100 * GIB, 100 * GIB, 0))
    assert checks.disk().status == "fail"
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: usage(100 * GIB, 0, 100 * GIB))
    assert checks.disk().status == "pass"
    monkeypatch.setattr(checks.os, "access", lambda *_: False)
    assert "cannot be written" in checks.disk().evidence


def test_large_warm_starts_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("MTRL_CACHE", str(tmp_path))
    for i in range(3):
        folder = tmp_path / "warm_start" / f"gsm8k-{i}"
        folder.mkdir(parents=True)
        assert "warm start" not in checks.disk().evidence
        with (folder / "model.safetensors").open("wb") as file:
            file.truncate(GIB // 2 - i)  # takes no space
    assert f"{tmp_path}, where 3 warm starts, which may be deleted, take 1 GiB)" in checks.disk().evidence


def test_aws_names_no_secret(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert checks.aws().status == "skip"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIASECRET")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    found = checks.aws()
    assert found.status == "pass" and "environment variables" in found.evidence
    assert "AKIASECRET" not in str(found) and "hidden" not in str(found)


def test_a_port_that_is_taken(monkeypatch):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr(checks, "RENDEZVOUS", taken.getsockname()[1])
        assert checks.ports().status == "warn"
    assert checks.ports().status == "pass"


def test_an_engine_whose_environment_is_broken(monkeypatch):
    monkeypatch.setenv("MTRL_VLLM_PYTHON", "/bin/false")
    found: CheckResult = checks.engine("vllm")()
    assert found.status == "warn" and "install_engine.py vllm" in found.fix
    monkeypatch.setenv("MTRL_VLLM_PYTHON", "/nonexistent")
    assert checks.engine("vllm")().status == "skip"


@pytest.mark.parametrize(
    ("gpus", "engine", "commands"),
    [
        ([], None, ["mtrl train", "mtrl doctor --plan"]),
        ([("RTX", 4 * GIB)], "vllm", ["mtrl train"]),
        ([("H100", 79 * GIB)], "vllm", ["mtrl train experiment=sop_hf model=qwen3_8b placement=1_gpu"]),
        (
            [("H100", 79 * GIB)] * 8,
            None,
            ["python scripts/install_engine.py vllm", "torchrun --standalone --nproc-per-node 6 -m mtrl.main"],
        ),
    ],
    ids=["cpu", "small", "one", "eight"],
)
def test_advice_for_a_machine(gpus, engine, commands):
    found = [advice.command for advice in advise(gpus, engine)]
    assert all(any(command.startswith(start) for command in found) for start in commands), found


def test_a_plan_is_printed_and_its_status_says_whether_it_fits(capsys):
    words = ["--plan", "model=qwen3_0_6b", "placement=1_gpu", "generator.backend=vllm"]
    assert doctor.main(words) == 0
    assert "fits, by this estimate" in shown(capsys)
    assert doctor.main([*words, "placement.gpu_memory=12"]) == 1
    text = shown(capsys)
    assert "does not fit: the" in text and "→" in text
    assert doctor.main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True


def test_settings_without_a_plan_are_refused():
    with pytest.raises(UserError, match=r"model=x is a setting of a run; plan that run with: --plan model=x"):
        doctor.main(["model=x"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--plan", "--propose"], "--plan and --propose exclude each other"),
        (["--plan", "--no-smoke"], "--no-smoke has no effect with --plan; leave it out"),
        (["--config-dir", "mine"], "--config-dir=mine has no effect without --plan or --propose"),
    ],
)
def test_options_without_an_effect_are_refused(words, sentence):
    with pytest.raises(UserError, match=sentence):
        doctor.parse(words)
