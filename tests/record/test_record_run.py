"""The one reader of a run's folder."""

import json
import os

import pytest

from mtrl.diagnose.record import Record
from mtrl.errors import UserError
from mtrl.record.run import Run, run_of
from mtrl.record.run_dir import RunDir
from mtrl.record.run_lock import RunLock


@pytest.fixture
def run(tmp_path):
    """A run of two steps as an early version of mtrl wrote it: no status, no checksums, few settings."""
    folder = tmp_path / "run"
    (folder / "trajectories").mkdir(parents=True)
    (folder / "config.yaml").write_text("name: mine\nseed: 3\ntrainer:\n  max_steps: 2\n")
    rows = [{"step": 0, "val/success/mean": 0.5}, {"step": 2, "a": 2.0}, {"step": 1, "a": 1.0}, {"step": 2, "a": 3.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text('{"steps": 2}')
    return folder


def add_checkpoint(run, step, score=None):
    folder = run / "checkpoints" / f"step_{step:06d}"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"step": step, "score": score}))
    return folder


def test_a_run_of_an_early_version_is_read(run):
    found = Run.open(run)
    assert (found.name, found.seed, found.max_steps) == ("mine", 3, 2)
    assert found.config["trainer"] == {"max_steps": 2} and found.settings["algorithm.group_size"] == 8
    assert [row["step"] for row in found.rows] == [0, 1, 2] and found.series("a") == {1: 1.0, 2: 3.0}
    assert found.summary == {"steps": 2} and found.is_over and found.status == "finished"
    assert list(found.trajectories()) == found.files() == found.spans == found.problems() == []


def test_a_resumed_run_is_not_over_before_its_first_row(run):
    """summary.json is that of the earlier end, and newer than the last row. A killed run is over after a while."""
    (run / "status.txt").write_text("running\n")
    assert not Run(run).is_over
    with RunLock(RunDir(run)):
        for file in ("metrics.jsonl", "summary.json", "config.yaml", "run.log"):
            os.utime(run / file, (1, 1))
        assert not Run(run).is_over and Run(run).status == "running"
    assert Run(run).is_over and Run(run).status == "stopped"


def test_a_first_run_that_was_killed_is_over_after_a_while(run):
    (run / "status.txt").write_text("running\n")
    (run / "summary.json").unlink()
    assert not Run(run).is_over
    for file in ("metrics.jsonl", "config.yaml"):
        os.utime(run / file, (1, 1))
    assert Run(run).is_over and Run(run).was_killed and Run(run).status == "stopped"


def test_an_evaluation_that_was_killed_before_its_status_is_over_after_a_while(run):
    """`mtrl track --follow` waited for ever."""
    (run / "models.json").write_text("[]")
    for file in ("metrics.jsonl", "summary.json"):
        (run / file).unlink()
    assert not Run(run).is_over and not Run(run).was_killed
    os.utime(run / "config.yaml", (1, 1))
    assert Run(run).is_over and Run(run).was_killed
    (run / "report.json").write_text("{}")
    assert Run(run).is_over and not Run(run).was_killed


def test_a_resumed_evaluation_is_not_over_by_its_earlier_report(run):
    (run / "report.json").write_text("{}")
    assert Run(run).is_over
    (run / "status.txt").write_text("running\n")
    assert not Run(run).is_over


def test_a_file_is_no_run(run):
    with pytest.raises(UserError, match=r"config.yaml is a file; give the folder of a run, such as .*run$"):
        Run.open(run / "config.yaml")


def test_a_run_that_must_not_be_read_is_named(run, monkeypatch):
    def refused(path):
        """Root may read every folder, so the error of other users is made here."""
        raise PermissionError(13, "Permission denied")

    shown = Run.open(run)
    monkeypatch.setattr(type(shown.dir.config), "is_file", refused)
    with pytest.raises(UserError, match=r"run cannot be read \(Permission denied\); let this user read the folder"):
        Run.open(run)


def test_changed_files_are_read_again(run):
    found = Run(run)
    assert found.last_step == 2 and found.settings["seed"] == 3
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "a": 1.0}\n')
    (run / "config.yaml").write_text("seed: 4\n")
    os.utime(run / "config.yaml", (1, 1))
    assert found.last_step == found.step == 4 and found.settings["seed"] == 4


def test_a_damaged_row_is_named_and_left_out(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write("{\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl:5 is not a row of metrics; remove the line"):
        _ = Run(run).rows
    assert Run(run).step == 2 and len(Run(run).metrics.refresh()) == 4


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("read", [lambda run: (run.settings, run.rows), lambda run: Record.load(run.path)])
def test_links_out_of_the_run_and_pipes_are_refused(run, tmp_path, name, kind, read):
    (tmp_path / "secret").write_text('{"step": 1, "name": "secret"}\n')
    (run / name).unlink()
    if kind == "link":
        (run / name).symlink_to(tmp_path / "secret")
    else:
        os.mkfifo(run / name)
    with pytest.raises(UserError, match="is not read|has no config.yaml"):
        read(Run(run))


def test_trajectories_outside_of_the_run_are_not_read(run, tmp_path):
    (tmp_path / "secret.jsonl").write_text("{}\n")
    (run / "trajectories" / "train_step_000001.jsonl").symlink_to(tmp_path / "secret.jsonl")
    assert Run(run).files() == [] and Record.load(run).files("train") == []


def test_the_best_checkpoint_is_the_latest_of_the_highest_score(run):
    assert Run(run).checkpoints == [] and Run(run).best_checkpoint is None
    first, second, third = (add_checkpoint(run, *each) for each in ((1, 0.5), (2, 0.5), (10, 0.25)))
    (run / "checkpoints" / "step_000011").mkdir()  # incomplete
    (add_checkpoint(run, 12) / "state.json").write_text("[" * 100_000)  # nested too deeply for Python's parser
    assert Run(run).checkpoints[:3] == [first, second, third]
    assert Run(run).best_checkpoint == second


def test_the_run_of_a_path_within_it(run, tmp_path):
    checkpoint = add_checkpoint(run, 1)
    assert run_of(run) == run_of(run / "trajectories" / "x.jsonl") == run_of(checkpoint) == run
    assert run_of(tmp_path) is None


@pytest.mark.parametrize(("name", "message"), [("no", "does not exist; give"), ("empty", "has no config.yaml; give")])
def test_a_folder_without_a_run_is_refused(tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=message):
        Run.open(tmp_path / name)
