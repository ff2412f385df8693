"""The self-test of the doctor: real cases on a CPU, cases that fail in each way, and the recommended settings."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from mtrl.doctor import __main__ as doctor
from mtrl.doctor import machine
from mtrl.doctor.machine import Torch
from mtrl.doctor.self_test import process, program, random_model, servers
from mtrl.doctor.self_test.bench import GPU, QUICK, Bench
from mtrl.doctor.self_test.case import CASES, MODEL, Case
from mtrl.doctor.self_test.drift import DriftStatistics
from mtrl.doctor.self_test.outcome import CaseResult
from mtrl.doctor.self_test.recommend import recommend
from mtrl.engines.local.engine import LocalEngine
from mtrl.errors import UserError
from mtrl.preflight.checklist_table import NAME
from mtrl.preflight.result import failed, passed
from mtrl.trainer.loading import load_model
from tests import forked
from tests.divided_models import not_divided

GIB = 2**30
DIVIDED = ("tensor 2 ranks", "experts 2 ranks")
LEFT_OUT_ON_A_CPU = ["local graphs", "update flash", "update compiled", "vllm sleep", "sglang sleep"]


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    """Processes are forked from a server that has imported torch, on a machine without a GPU."""
    monkeypatch.setattr(machine, "ask_torch", lambda: Torch(torch.__version__, None, ()))
    monkeypatch.setattr(subprocess, "Popen", forked.Popen)
    for engine in ("VLLM", "SGLANG"):  # only subprocess can start the interpreters of engines
        monkeypatch.delenv(f"MTRL_{engine}_PYTHON", raising=False)


@pytest.fixture
def self_test(tmp_path, monkeypatch, capsys):
    """Run a self-test with these cases; return the exit status, the JSON document and the lines of the terminal."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(cases, *words):
        file = tmp_path / "results" / "self_test.json"
        args = doctor.parse(["--self-test", "--quick", "--json", str(file), *words])
        status = program.self_test(args, cases)
        return status, json.loads(file.read_text()), capsys.readouterr().out.splitlines()

    return run


def planted(name, seconds=300.0, **fields):
    return Case(name, f"tests.doctor.planted_cases:{name}", seconds, **fields)


@pytest.fixture
def model(tmp_path):
    """A folder that counts as a model; the planted cases do not read it."""
    folder = tmp_path / "some model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return f"model.path={folder}"


def line_of(name, lines):
    (found,) = [line for line in lines if line[6:].startswith(f"{name} ")]
    return found


@pytest.mark.slow
@pytest.mark.ci
def test_each_part_runs_on_a_cpu(self_test):
    status, found, lines = self_test(CASES)
    checks = {check["name"]: check for check in found["checks"]}
    assert [*checks] == [MODEL.name, *(case.name for case in CASES)]
    assert status == 0 and {check["status"] for check in checks.values()} == {"pass", "skip"}, lines
    skipped = {name for name, check in checks.items() if check["status"] == "skip"}
    assert skipped - {"vllm", "sglang"} == {*LEFT_OUT_ON_A_CPU, *(DIVIDED if not_divided() else ())}
    assert all(check["evidence"] for check in checks.values())
    figures = {name: check["figures"] for name, check in checks.items()}
    assert figures["update bfloat16"]["tokens_per_second"] > 0 < figures["update bfloat16"]["peak_share"]
    assert sum(each["tokens"] for each in figures["local eager"]["gap_histogram"]) == 4 * 16
    assert figures["local eager"]["gap_quantiles_nats"]["1.0"] < 1e-3
    assert figures["gradients"]["cosine"] > 0.99
    assert figures["recomputation"]["relative_error"] == 0
    for name in {"fsdp 2 ranks", "sequence 2 ranks", *DIVIDED} - skipped:
        assert figures[name]["relative_error"] < 0.01, name
    assert 0 < figures["sync broadcast"]["changes_bytes"] < figures["sync broadcast"]["bytes"] / 10
    assert figures["sync broadcast"]["transport"] == "gloo" and figures["sync by memory"]["gb_per_second"] > 0
    keys = [setting["key"] for setting in found["recommended"]]
    assert keys == ["trainer.fsdp.param_dtype", "trainer.max_tokens_per_microbatch", "generator"]
    assert all(len(line) <= 80 for line in lines if not line.startswith("all figures"))


def test_the_json_document(self_test, model):
    status, found, lines = self_test([planted("passes")], model)
    assert status == 0 and lines[-1].endswith("self_test.json")
    assert found.keys() == {*("name", "format", "time", "status", "machine", "model", "sizes", "checks", "recommended")}
    assert (found["name"], found["format"], found["status"]) == ("self-test", program.FORMAT, "pass")
    assert found["machine"].keys() == {"gpus", "host", "load_average", "python", "packages", "engines"}
    (check,) = found["checks"]
    assert check.keys() == {"name", "status", "evidence", "fix", "details", "seconds", "figures"}
    assert (check["evidence"], check["figures"]) == ("fine", {"tokens_per_second": 5.0})


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (planted("raises"), "RuntimeError: CUDA error: an illegal memory access was encountered"),
        (planted("hangs", seconds=1.0), "it did not end within 1 seconds"),
        (planted("is_killed"), "the process was ended by SIGKILL"),
        (planted("exits"), "exit status 3: the driver is too old"),
        (planted("follower_raises", ranks=2), "exit status 1"),
        (Case("no_such", "tests.doctor.planted_cases:no_such", 300.0), "AttributeError"),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)
def test_a_failure_costs_one_line(case, message, self_test, model, monkeypatch):
    monkeypatch.setattr(process, "GRACE", 0.2)
    status, found, lines = self_test([case, planted("passes")], model)
    bad, good = found["checks"]
    assert status == 1 and found["status"] == "fail"
    assert (bad["name"], bad["status"], good["status"]) == (case.name, "fail", "pass")
    assert message in bad["evidence"] and bad["fix"]
    assert line_of(case.name, lines).startswith("fail") and line_of("passes", lines).startswith("pass")
    assert any("1 failed" in line for line in lines)


def test_a_failure_keeps_the_end_of_its_output(self_test, model):
    _, found, _ = self_test([planted("raises")], model)
    details = found["checks"][0]["details"]
    assert details[0] == "some output" and details[-1] == "more about it"


def test_a_failure_keeps_the_end_of_the_logs_of_servers(self_test, model):
    _, found, _ = self_test([planted("server_fails")], model)
    assert found["checks"][0]["details"][-1] == "vllm-0.log: NCCL error: unhandled system error"


def test_without_a_model_all_other_cases_are_skipped(self_test, monkeypatch):
    monkeypatch.setattr(program, "MODEL", replace(planted("raises"), name=MODEL.name))
    status, found, _ = self_test([planted("passes")])
    model, other = found["checks"]
    assert (status, model["status"], other["status"]) == (1, "fail", "skip")
    assert other["evidence"] == "the model could not be built"


def test_cases_after_the_time_limit_are_skipped(self_test, model, monkeypatch):
    monkeypatch.setattr(program, "LIMIT", 0.0)
    status, found, _ = self_test([planted("hangs")], model)
    assert status == 0 and found["checks"][0]["evidence"] == "the 0 minutes of the self-test are over"


def test_cases_name_what_the_machine_lacks(monkeypatch):
    monkeypatch.setattr("mtrl.doctor.self_test.case.engine_python", lambda name, chosen: "python")
    bench = partial(Bench, "model", GPU, scratch="folder")
    one = {case.name: case.reason_to_skip(bench(gpus=1)) for case in CASES}
    assert {name for name, reason in one.items() if reason} == {
        "fsdp 2 ranks",
        "offload 2 ranks",
        "sequence 2 ranks",
        *DIVIDED,
        "sync broadcast",
        "update flash",
    }
    assert one["sync broadcast"] == "sync broadcast needs 2 GPUs, and this machine has 1"
    assert [case.name for case in CASES if case.reason_to_skip(bench(gpus=2))] == ["update flash"]
    assert one["update flash"] == "none of these packages is installed: flash_attn_interface, flash_attn"
    monkeypatch.setattr("mtrl.doctor.self_test.case.find_spec", lambda name: name == "flash_attn" or None)
    assert not any(case.reason_to_skip(bench(gpus=2)) for case in CASES)
    assert all(len(case.name) <= NAME for case in CASES)


def test_a_case_for_newer_packages_is_skipped(monkeypatch):
    monkeypatch.setattr("mtrl.doctor.self_test.case.version", lambda name: "5.17.0")
    skipped = {case.name: case.reason_to_skip(Bench("model", QUICK, 0, "folder")) for case in CASES}
    assert skipped["tensor 2 ranks"] == "it needs transformers 5.23, and 5.17.0 is installed"
    assert not skipped["sequence 2 ranks"]


def test_an_engine_that_is_not_installed_is_skipped(monkeypatch):
    def absent(name, chosen):
        raise UserError("there is none")

    monkeypatch.setattr("mtrl.doctor.self_test.case.engine_python", absent)
    (case,) = [case for case in CASES if case.name == "vllm"]
    reason = case.reason_to_skip(Bench("model", QUICK, 0, "folder"))
    assert reason == "vllm is not installed; python scripts/install_engine.py vllm"


class StandInServer:
    """The local engine with a copy of the weights, in place of a server; `sleep` frees GPU memory."""

    def __init__(self, config, world, path, model_config, context, logs, *, freed):
        model, tokenizer = load_model(config, path)
        self.engine = LocalEngine(model, tokenizer, config.generator.max_num_seqs, context)
        self.freed, self.free, self.calls = freed, 10 * GIB, []

    def __getattr__(self, name):
        return getattr(self.engine, name)

    async def sleep(self):
        self.calls.append("sleep")
        self.free += self.freed

    async def wake(self):
        self.calls.append("wake")
        self.free -= self.freed

    async def load_weights(self, weights, version):
        self.calls.append("load_weights")
        await self.engine.load_weights(weights, version)


@pytest.mark.slow
@pytest.mark.parametrize(("freed", "status"), [(30 * GIB, "pass"), (5 * GIB, "fail")])
def test_a_server_sleeps_during_the_update(freed, status, tmp_path, monkeypatch):
    started = []

    def start(*arguments):
        started.append(StandInServer(*arguments, freed=freed))
        return started[0]

    monkeypatch.setenv("MTRL_VLLM_PYTHON", sys.executable)
    monkeypatch.setattr(servers, "server_engine", start)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (started[0].free if started else 0, 80 * GIB))
    bench = Bench(str(tmp_path / "model"), QUICK, 0, str(tmp_path))
    random_model.build(bench)
    found = servers.vllm_sleep(bench)
    assert found.result.status == status, found
    assert started[0].calls == ["sleep", "wake", "load_weights"]
    assert found.figures["freed_bytes"] == freed and found.figures["server_bytes"] == int(0.4 * 80 * GIB)
    assert ("the server keeps its memory" in found.result.evidence) == (status == "fail")


@pytest.mark.parametrize(("gpus", "colocate"), [(1, True), (2, True), (2, False)])
@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_the_settings_of_servers_compose(name, gpus, colocate, tmp_path, monkeypatch):
    monkeypatch.setenv(f"MTRL_{name.upper()}_PYTHON", sys.executable)
    bench = Bench("model", GPU, gpus, str(tmp_path))
    config = bench.config(*servers.server_overrides(bench, name, colocate))
    settings = getattr(config.generator, name)
    assert (config.generator.backend, settings.colocate) == (name, colocate)
    assert settings.weight_sync == ("tensor" if colocate else "distributed")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainer.max_steps=3"], "it takes model.path=FOLDER only"),
        (["model.path=no-such-folder"], "has no config.json"),
    ],
)
def test_other_settings_are_refused(words, message):
    with pytest.raises(UserError, match=message):
        doctor.parse(["--self-test", *words])


def test_the_option_may_be_abbreviated():
    assert doctor.parse(["--self", "--quick"]).json == program.JSON


def test_what_would_cost_the_results_is_refused_before_the_first_case(tmp_path, monkeypatch):
    args = doctor.parse(["--self-test", "--json", str(tmp_path)])
    with pytest.raises(UserError, match="--json .* cannot be written .*; name another file"):
        program.self_test(args, [])

    def broken():
        raise RuntimeError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(machine, "ask_torch", broken)
    with pytest.raises(UserError, match="PyTorch cannot be used: libcudart.so.12.*; mtrl doctor names the fix"):
        program.self_test(args, [])


def test_a_model_may_be_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert doctor.parse(["--self-test", "model.path=~/mine"]).model == str(tmp_path / "mine")


def test_the_gap_of_log_probs():
    drift = DriftStatistics(torch.tensor([-1.0, -2.0, -3.0, -4.0]), torch.tensor([-1.0, -2.05, -3.0005, -4.0]))
    assert drift.mean == pytest.approx(0.0505 / 4, rel=1e-3)
    assert "differ by 0.013 nats on average, more than 0.001" in drift.problem(torch.float32)
    assert not drift.problem(torch.bfloat16)
    counts = {each["from_nats"]: each["tokens"] for each in drift.figures()["gap_histogram"]}
    assert counts[0.0] == 2 and counts[1e-4] == 1 and counts[1e-2] == 1 and sum(counts.values()) == 4
    assert DriftStatistics(torch.tensor([float("nan")]), torch.tensor([0.0])).problem(torch.bfloat16)


def test_recommended_settings_follow_from_cases_that_passed():
    rates = {"update float32": 100.0, "update bfloat16": 250.0, "update compiled": 252.0, "update flash": 300.0}
    outcomes = {name: CaseResult(passed(""), {"tokens_per_second": rate}) for name, rate in rates.items()}
    outcomes["update bfloat16"].figures["held_bytes"] = 8 * GIB
    outcomes["update flash"].figures["attn_implementation"] = "flash_attention_2"
    outcomes["gradients"] = CaseResult(passed(""))
    by_tokens = {"4096": {"tokens_per_second": 200.0}, "8192": {"tokens_per_second": 250.0}}
    outcomes["micro-batches"] = CaseResult(passed(""), {"tokens": 8192, "by_tokens": by_tokens})
    outcomes["local eager"] = CaseResult(passed(""), {"tokens_per_second": 1000.0})
    outcomes["vllm sleep"] = outcomes["vllm"] = CaseResult(passed(""), {"tokens_per_second": 9000.0})
    outcomes["sglang"] = CaseResult(failed("", ""), {"tokens_per_second": 10_000.0})
    assert {setting.key: setting.value for setting in recommend(outcomes, 80 * GIB)} == {
        "trainer.fsdp.param_dtype": "bfloat16",
        "trainer.compile": "false",
        "model.attn_implementation": "flash_attention_2",
        "trainer.max_tokens_per_microbatch": "8192",
        "generator": "vllm",
        "generator.gpu_memory_utilization": "0.80",
    }
    outcomes["gradients"] = CaseResult(failed("", ""))
    assert "trainer.fsdp.param_dtype" not in {setting.key for setting in recommend(outcomes, 80 * GIB)}
    assert recommend({}, 0) == []


def cases_of(pid):
    """Return the process ids of the cases that a self-test runs now."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [child for child in children if b"self_test.child" in command_line(child)]


def command_line(pid):
    """Return the command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_running_case_too(number, tmp_path):
    parent = subprocess.Popen(
        [sys.executable, "-m", "mtrl.doctor", "--self-test", "--quick", "--json", str(tmp_path / "found.json")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while not (found := cases_of(parent.pid)):
        assert parent.poll() is None
        time.sleep(0.05)
    parent.send_signal(number)
    output, _ = parent.communicate(timeout=60)
    assert parent.returncode == 1 and f"stopped by {number.name} in model" in output
    assert json.loads((tmp_path / "found.json").read_text())["checks"] == [], "the results so far"
    assert not any(Path(f"/proc/{child}").exists() for child in found)
