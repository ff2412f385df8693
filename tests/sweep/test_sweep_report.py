"""The report: order, differing settings, means over seeds, and folders with other content."""

import json
import math
import os

import pytest
from sweeps import ROOT, make_job

from mtrl.config.overrides import normalise
from mtrl.errors import UserError
from mtrl.record.run_dir import RunDir
from mtrl.record.run_lock import RunLock
from mtrl.sweep.__main__ import main
from mtrl.sweep.outcome import read_outcome
from mtrl.sweep.run import names_sweep, typed_out
from mtrl.sweep.sweep_runs import read_sweep
from mtrl.sweep.table import resume_command, rounded


def made(folder, direction="maximize"):
    for number, (rate, seed, value) in enumerate([(1, 0, 0.2), (1, 1, 0.4), (2, 0, 0.5), (2, 1, 0.9)]):
        words = [f"trainer.optimizer.lr={rate}", f"seed={seed}", "debug=fast", "run_dir=x", "sweep=credit", "resume=no"]
        make_job(folder, number, words, value, direction=direction)
    make_job(folder, 4, ["trainer.optimizer.lr=2", "seed=2", "debug=fast"], 0.95, "pruned", "others did better")
    make_job(folder, 5, ["trainer.optimizer.lr=3", "seed=0", "debug=fast"], None, "failed", "there is [red]no[/] luck")
    return folder


def make_running_job(folder):
    job = make_job(folder, 0, ["seed=0"])
    told = json.loads(RunDir(job).job.read_text()) | {"status": "running", "ended": None}
    RunDir(job).job.write_text(json.dumps(told))
    return job


def let_time_pass(job):
    for path in job.iterdir():
        os.utime(path, (1, 1))


def test_the_best_is_first_then_the_pruned_then_the_others(tmp_path):
    sweep = read_sweep(made(tmp_path))
    assert [job.number for job in sweep.jobs] == [3, 2, 1, 0, 4, 5]
    assert sweep.keys == ["trainer.optimizer.lr", "seed"]
    assert sweep.best.command == "mtrl train trainer.optimizer.lr=2 seed=1 debug=fast"
    assert (sweep.jobs[0].steps, sweep.jobs[0].max_steps, sweep.jobs[0].seconds) == (2, 2, 12.5)


def test_less_may_be_better(tmp_path):
    assert [job.number for job in read_sweep(made(tmp_path, "minimize")).jobs][:4] == [0, 1, 2, 3]


def test_seeds_are_averaged_where_something_else_differs(tmp_path):
    families = read_sweep(made(tmp_path)).over_seeds()
    assert [(f.settings, f.count) for f in families] == [
        ({"trainer.optimizer.lr": "2"}, 2), ({"trainer.optimizer.lr": "1"}, 2)
    ]  # fmt: skip
    assert [f.mean for f in families] == pytest.approx([0.7, 0.3])
    assert families[0].deviation == pytest.approx(0.08**0.5)
    for number in (0, 1):
        make_job(tmp_path / "seeds", number, [f"seed={number}"], 0.5)
    assert read_sweep(tmp_path / "seeds").over_seeds() == []


def test_the_program_prints_failures_without_markup(tmp_path, capsys):
    assert main([str(made(tmp_path))]) == 0
    shown = capsys.readouterr().out
    assert "job 5 failed: there is [red]no[/] luck" in shown and "6 jobs, 1 of them pruned" in shown
    assert shown.splitlines()[-1] == "  mtrl train trainer.optimizer.lr=2 seed=1 debug=fast"


def test_a_job_that_died_is_not_running(tmp_path):
    """Its status is running, and its files have not changed for a long time."""
    job = make_running_job(tmp_path)
    assert read_sweep(tmp_path).jobs[0].status == "running"
    let_time_pass(job)
    assert read_sweep(tmp_path).jobs[0].status == "stopped"


@pytest.mark.parametrize("before", [None, "stopped", "finished"])
def test_a_job_without_a_row_runs_while_its_process_lives(tmp_path, before):
    """A job may prepare for minutes without a sign, while status.txt is that of its earlier end."""
    job = make_running_job(tmp_path)
    for file in ("metrics.jsonl", "config.yaml"):
        (job / file).unlink()
    if before is not None:
        (job / "status.txt").write_text(before)
    assert read_sweep(tmp_path).jobs[0].status == "running"  # by job.json: the process is starting
    with RunLock(RunDir(job)):
        let_time_pass(job)
        assert read_sweep(tmp_path).jobs[0].status == "running"
    assert read_sweep(tmp_path).jobs[0].status == "stopped"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "{}", '{"number": "x"}', '{"number": 1e999}', "[" * 5000, '{"status": "<b>"}', "\xff"],
    ids=["empty", "list", "null", "keys", "number", "infinite", "deep", "status", "bytes"],
)
def test_invalid_outcome_files_are_none(tmp_path, text):
    RunDir(tmp_path).job.write_text(text, encoding="latin-1")
    assert read_outcome(tmp_path) is None


@pytest.mark.parametrize("key", ["started", "ended", "value"])
@pytest.mark.parametrize("number", [float("inf"), float("nan"), 10**400], ids=["infinite", "nan", "huge"])
def test_no_number_of_a_strangers_outcome_ends_the_report(tmp_path, key, number):
    job = make_job(tmp_path, 0, ["seed=0"], 0.5)
    RunDir(job).job.write_text(json.dumps(json.loads(RunDir(job).job.read_text()) | {key: number}))
    outcome = read_outcome(job)
    assert outcome is None or (math.isfinite(outcome.value or 0) and math.isfinite(outcome.seconds or 0))


def test_untrusted_text_does_not_control_the_terminal(tmp_path, capsys):
    jobs = [make_job(tmp_path, 0, ["name=\x1b[2J[/red]"], None, "failed", "\x1b]0;pwned\x07[/bold]")]
    jobs.append(make_job(tmp_path, 1, ["name=2024.01.15"], None, "failed"))
    for job in jobs:
        RunDir(job).job.write_text(json.dumps(json.loads(RunDir(job).job.read_text()) | {"objective": "[/]\x1b[2J"}))
    assert main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\x07" not in shown
    assert "job 0 failed: \\x1b]0;pwned\\x07[/bold]" in shown and "2024.01.15" in shown


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("0.000123456789", "0.000123"),
        ("-1.23456789e-05", "-1.23e-05"),
        ("2024.01.15", "2024.01.15"),
        ("1234567890123", "1234567890123"),
        ("0.001", "0.001"),
    ],
)
def test_only_long_fractions_are_rounded(typed, shown):
    assert rounded(typed) == shown


def test_the_resume_command_repeats_all_words():
    words = ["--config-dir", "my groups", "-m", "seed=1,2", "run_dir=old", "resume=none"]
    told = "mtrl train --config-dir 'my groups' -m seed=1,2 run_dir=sweep resume=latest"
    assert resume_command(words, "sweep") == told


def test_an_outcome_is_read_from_its_folder_only(tmp_path):
    job = make_job(tmp_path / "sweep", 0, ["seed=0"], 0.5)
    (tmp_path / "other").mkdir()
    RunDir(tmp_path / "other").job.symlink_to(RunDir(job).job)
    assert read_outcome(job) is not None and read_outcome(tmp_path / "other") is None


def test_folders_without_a_sweep_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"holds no sweep \(no folder in it has a job.json\)"):
        read_sweep(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        read_sweep(tmp_path / "none")


@pytest.mark.parametrize("path", sorted((ROOT / "conf" / "sweep").glob("*.yaml")), ids=lambda path: path.stem)
def test_prepared_sweeps_compose(path):
    """They also compose with the command in their file."""
    if path.stem == "optuna":
        pytest.importorskip("optuna", reason="pip install -e '.[sweep]'")
    told = [line.partition("mtrl train ")[2] for line in path.read_text().splitlines() if "mtrl train" in line]
    assert told[0] == f"sweep={path.stem}"
    for words in told:
        overrides = normalise([word.strip("'") for word in words.split()])
        assert names_sweep(overrides) and typed_out(overrides, None)[-1] == "hydra.sweeper.params=null"
