"""The container's entry, run as a process with SageMaker's variables in a folder of the test."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

import mtrl.main as main_module
from mtrl.errors import UserError
from mtrl.sagemaker import container, source
from tests import forked

SMALL = (
    "experiment=text_to_sql",
    "debug=fast",
    "evaluation.before_train=false",
    "evaluation.every_steps=0",
    "evaluation.rows=1",
    "evaluation.sampled_rows=0",
    "preflight.at_start=none",
    "tracker.plots=false",
    "tracker.project='it\\'s $(touch hacked) `x`'",
)
PATIENCE = 120
"""Time limit in seconds for work of a few seconds."""


@pytest.fixture
def job(tmp_path):
    """The archive, unpacked in the container's place, and the variables that SageMaker sets."""
    source.pack(tmp_path / "code.tar.gz", [*SMALL, "trainer.max_steps=4"], [".[data]"])
    with tarfile.open(tmp_path / "code.tar.gz") as tar:
        tar.extractall(tmp_path / "code", filter="data")
    (tmp_path / "output").mkdir()
    return {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "SM_HOSTS": '["algo-1"]',
        "SM_CURRENT_HOST": "algo-1",
        "SM_NUM_GPUS": "0",
        "SM_CHECKPOINT_DIR": str(tmp_path / "checkpoints"),
        "SM_MODEL_DIR": str(tmp_path / "model"),
        "SM_OUTPUT_FAILURE": str(tmp_path / "output" / "failure"),
    }


def start(folder, job):
    command = [sys.executable, source.ENTRY]
    return forked.Popen(command, cwd=folder / "code", env=job, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def wait_for(path, process):
    until = time.monotonic() + PATIENCE
    while not path.exists():
        assert process.poll() is None and time.monotonic() < until, process.stdout.read().decode()
        time.sleep(0.05)


@pytest.mark.slow
def test_an_interrupted_job_resumes_and_leaves_its_model(tmp_path, job):
    run = tmp_path / "checkpoints" / "run"
    process = start(tmp_path, job)
    wait_for(run / "checkpoints" / "step_000001", process)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=PATIENCE)[0].decode()
    assert process.returncode == os.EX_TEMPFAIL, said
    saved = sorted(path.name for path in (run / "checkpoints").glob("step_*"))
    assert saved and "step_000004" not in saved
    assert not (tmp_path / "model").exists()
    assert "SIGTERM" in (tmp_path / "output" / "failure").read_text()

    # SageMaker may restore the folder with one incompletely copied checkpoint, for the second time.
    (run / "checkpoints" / "damaged-step_000099" / "old").mkdir(parents=True)
    torn = run / "checkpoints" / "step_000099"
    torn.mkdir()
    for file in (run / "checkpoints" / saved[-1]).iterdir():
        (torn / file.name).write_bytes(file.read_bytes())
    (torn / "model.safetensors").write_bytes((torn / "model.safetensors").read_bytes()[:-1])
    process = start(tmp_path, job)
    said = process.communicate(timeout=PATIENCE)[0].decode()
    assert process.returncode == 0, said
    assert f"resumed from {run / 'checkpoints' / saved[-1]}" in (run / "run.log").read_text()
    assert (run / "checkpoints" / "damaged-step_000099" / "state.json").is_file()
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step for step in steps if step > 0] == [1, 2, 3, 4]
    assert {"config.json", "model.safetensors"} <= {path.name for path in (tmp_path / "model").iterdir()}
    assert not list(tmp_path.rglob("hacked"))


def test_the_archive_holds_only_the_code_that_runs(tmp_path):
    packed = []
    for _ in range(2):
        source.pack(tmp_path / "one", SMALL, [".[data]", "peft<1"])
        packed.append((tmp_path / "one").read_bytes())
    assert packed[0] == packed[1]
    with tarfile.open(tmp_path / "one") as tar:
        names = tar.getnames()
        assert json.load(tar.extractfile(source.OVERRIDES)) == list(SMALL)
        assert tar.extractfile(source.REQUIREMENTS).read() == b".[data]\npeft<1\n"
    assert {source.ENTRY, "mtrl/main.py", "conf/config.yaml", "envs/gsm8k/__init__.py", "setup.py"} <= set(names)
    assert not [name for name in names if name.startswith(("tests", "outputs", ".")) or "__pycache__" in name]


def test_files_of_ones_own_go_along(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("vault.py").write_text("x = 1")
    Path("setup.py").write_text("x = 1")
    source.pack(tmp_path / "archive", [], [], ["vault.py"])
    with tarfile.open(tmp_path / "archive") as tar:
        assert tar.extractfile("vault.py").read() == b"x = 1"
    for name, told in (("setup.py", "would overwrite setup.py of mtrl"), ("other.py", "other.py does not exist")):
        with pytest.raises(UserError, match=told):
            source.pack(tmp_path / "archive", [], [], [name])


def test_hidden_files_and_outputs_of_runs_are_not_packed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine/vault.py", "mine/.env.local", "mine/.aws/credentials", "mine/outputs/gsm8k/run.log", ".netrc"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("secret")
    source.pack(tmp_path / "archive", [], [], ["mine"])
    with tarfile.open(tmp_path / "archive") as tar:
        assert [name for name in tar.getnames() if name.startswith("mine")] == ["mine/vault.py"]
    with pytest.raises(UserError, match="nothing of .netrc would travel, since hidden files"):
        source.pack(tmp_path / "archive", [], [], [".netrc"])


@pytest.mark.parametrize(
    ("ends", "told"),
    [
        ("print('data.path=x does not exist', file=sys.stderr); raise SystemExit(2)", "data.path=x does not exist\n"),
        ("raise RuntimeError('out of memory')", "RuntimeError: out of memory\n"),
        ("raise SystemExit(75)", "the end of the log"),
        ("print('a warning', file=sys.stderr); raise SystemExit(0)", None),
    ],
)
def test_the_reason_of_a_failure_is_told(tmp_path, monkeypatch, ends, told):
    """The log of an earlier start of the job is no reason for a wrong setting or an error."""
    run = tmp_path / "kept" / "run"
    run.mkdir(parents=True)
    (run / "run.log").write_text("the end of the log")
    (tmp_path / source.OVERRIDES).write_text("[]")
    failure = tmp_path / "failure"
    for name, value in {"SM_CHECKPOINT_DIR": tmp_path / "kept", "SM_OUTPUT_FAILURE": failure, "RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(main_module, "cli", lambda words: exec(ends, {"sys": sys}))
    with pytest.raises((SystemExit, RuntimeError)):
        container.main(tmp_path, tmp_path / source.ENTRY)
    assert failure.read_text().endswith(told) if told else not failure.exists()


def test_where_things_are(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "rows.jsonl").write_text("")
    channels = {"SM_CHANNEL_DATA": str(tmp_path / "one"), "SM_CHANNEL_MODEL": str(tmp_path)}
    assert container.placed(channels) == [f"data.path='{tmp_path}/one/rows.jsonl'", f"model.path='{tmp_path}'"]
    shared = {"SM_CHANNEL_SHARED": "/fsx", "TRAINING_JOB_NAME": "job-1", "SM_CHECKPOINT_DIR": "/kept"}
    assert container.run_dir(shared) == Path("/fsx/job-1/run")
    assert container.run_dir({"SM_CHECKPOINT_DIR": "/kept"}) == Path("/kept/run")
    assert container.run_dir({}) == Path("/opt/ml/output/data/run")


def test_ranks_without_torchrun():
    entry = Path("scripts/sagemaker_entry.py")
    two = {"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "8"}
    command = container.torchrun(two, entry)
    assert command[1:3] == ["-m", "torch.distributed.run"]
    assert {"--nnodes=2", "--nproc-per-node=8", "--node-rank=1", "--master-addr=algo-1"} <= set(command)
    assert container.torchrun({**two, "RANK": "3"}, entry) is None  # the SDK's driver has started them
    assert container.torchrun({"SM_HOSTS": '["algo-1"]', "SM_NUM_GPUS": "1"}, entry) is None
    assert "--nproc-per-node=4" in container.torchrun({"SM_NUM_GPUS": "4"}, entry)
