"""The run directory: names, atomic summary, provenance."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from mtrl.config.schema import Config, EnvironmentConfig
from mtrl.errors import UserError
from mtrl.record.run_dir import SUMMARY_KEYS, RunDir
from mtrl.utils.provenance import git_state, versions


def test_the_names_of_files_are_fixed(tmp_path):
    run = RunDir(tmp_path)
    files = (run.config, run.metrics, run.curves, run.log, run.summary, run.preflight)
    folders = (run.trajectories, run.checkpoints, run.export)
    names = ["config.yaml", "metrics.jsonl", "curves.png", "run.log", "summary.json", "preflight.json"]
    assert [path.name for path in files] == names
    assert [path.name for path in folders] == ["trajectories", "checkpoints", "export"]
    paths = files + folders
    assert all(path.parent == tmp_path for path in paths)


def test_create_makes_folders_but_no_empty_export(tmp_path):
    run = RunDir(tmp_path / "deep" / "run").create()
    assert run.trajectories.is_dir() and run.checkpoints.is_dir() and not run.export.exists()


def test_create_refuses_a_folder_that_holds_a_run(tmp_path):
    run = RunDir(tmp_path).create()
    run.create()  # nothing was logged yet
    run.metrics.write_text('{"step": 1}\n')
    with pytest.raises(UserError, match="already holds a run; continue it with resume=latest"):
        run.create()
    assert run.create(resume=True) is run


@pytest.mark.parametrize("record", ["metrics.jsonl", "summary.json", "trajectories/eval.jsonl", "checkpoints/step_1"])
def test_a_run_has_records_after_its_start(tmp_path, record):
    run = RunDir(tmp_path).create()
    run.log.touch()
    run.config.touch()
    assert not run.has_records
    (tmp_path / record).touch()
    assert run.has_records


def test_create_names_the_folder_that_cannot_be_created(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"run_dir=.*file/run cannot be made"):
        RunDir(tmp_path / "file" / "run").create()


def test_config_is_written_resolved(tmp_path):
    from omegaconf import OmegaConf

    run = RunDir(tmp_path).create()
    config = OmegaConf.structured(Config(environment=EnvironmentConfig(name="gsm8k"), run_dir="outputs/${name}/0"))
    run.write_config(config)
    written = yaml.safe_load(run.config.read_text())
    assert written["run_dir"] == "outputs/gsm8k/0" and written["trainer"]["max_steps"] == 100
    run.write_config(Config(run_dir="x"))
    assert yaml.safe_load(run.config.read_text())["run_dir"] == "x"


def test_summary_has_every_key_and_the_given_values(tmp_path):
    run = RunDir(tmp_path)
    returned = run.write_summary({"steps": 60, "seed": 0, "success_after": float("nan"), "extra": 1})
    written = json.loads(run.summary.read_text())
    assert written == returned
    assert set(SUMMARY_KEYS) < set(written)
    assert (written["steps"], written["extra"], written["success_after"]) == (60, 1, None)
    assert written["versions"]["python"]


def test_summary_is_whole_or_absent(tmp_path, monkeypatch):
    run = RunDir(tmp_path)
    run.write_summary({"steps": 1})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        run.write_summary({"steps": 2})
    assert json.loads(run.summary.read_text())["steps"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_git_state(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True)

    assert git_state(tmp_path) is None
    git("init")
    assert git_state(tmp_path) is None  # no commit yet
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "one")
    clean = git_state(tmp_path)
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path) == {**clean, "dirty": True}


def test_git_state_without_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state() is None


def test_versions_import_nothing():
    code = "import sys; from mtrl.record import run_dir; from mtrl.utils import provenance; v = provenance.versions(); "
    code += "assert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules); print(v['mtrl'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == versions()["mtrl"]


def test_checksums_leave_out_the_files_that_change_after_the_end(tmp_path):
    run = RunDir(tmp_path).create()
    for file in (run.metrics, run.log, run.job):
        file.write_text("running")
    run.write_checksums()
    for file in (run.log, run.job):
        file.write_text("finished")
    assert run.changes() is None
    run.metrics.write_text("changed")
    assert "metrics.jsonl: not as it was written" in run.changes()


def test_status_reports_how_the_run_ended(tmp_path):
    run = RunDir(tmp_path)
    with run.under_way():
        assert run.status.read_text() == "running\n"
    assert run.status.read_text() == "finished\n"
    for end in (KeyboardInterrupt, ValueError):
        with pytest.raises(end), run.under_way():
            raise end
        assert run.status.read_text() == "stopped\n"
