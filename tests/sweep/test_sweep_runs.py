"""Sweeps that really run: with proposals and pruning by Optuna, in two processes, and as jobs of submitit."""

import json
import multiprocessing
import os
import signal
import subprocess
import time

import pytest
from sweeps import PATIENT, PAYOFF, QUICK, STAND_IN, program

from mtrl.errors import Interrupted, UserError
from mtrl.sweep.outcome import read_outcome
from mtrl.sweep.study import NAME, STUDY
from mtrl.sweep.workers import stopping
from mtrl.trainer.checkpoint.checkpoint import Checkpoints, read_checkpoint
from mtrl.utils.files import replace_text


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Four trials of an environment whose payoff is the varied setting, and the output of the command."""
    pytest.importorskip("optuna", reason="pip install -e '.[sweep]'")
    folder = tmp_path_factory.mktemp("swept")
    replace_text(folder / "payoff.py", PAYOFF)
    tried = ("trainer.optimizer.lr=1e-4", "environment.config.payoff=interval(0.0,1.0)", "hydra.sweeper.n_trials=4")
    pruner = "hydra.sweeper.pruner.n_startup_trials=1"
    done = program(folder, "sweep=optuna", *tried, "hydra.sweeper.n_jobs=2", pruner, *QUICK, "run_dir=sweep")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "sweep", done


@pytest.mark.slow
@pytest.mark.xdist_group("swept")
def test_a_sweep_finishes_and_reports_its_best(swept):
    """The best job is the one with the largest payoff, and it is first in the table."""
    folder, done = swept
    outcomes = [read_outcome(folder / str(number)) for number in range(4)]
    payoffs = [float(o.overrides[-1].partition("=")[2]) for o in outcomes]
    assert len(set(payoffs)) == 4
    assert [o.value for o in outcomes] == pytest.approx(payoffs, abs=1e-3)  # metrics are rounded
    best = max((o for o in outcomes if o.status == "finished"), key=lambda o: o.value)
    assert f"job {best.number} in sweep/{best.number}; again with:" in done.stdout
    assert f"++environment.config.payoff={payoffs[best.number]}" in done.stdout.splitlines()[-1]
    table = done.stdout.rpartition("sweep: 4 jobs, 2 of them pruned\n")[2]
    numbers = [line.split("│")[1].strip() for line in table.splitlines() if line.startswith("│")]
    assert int(numbers[0]) == best.number and sorted(numbers) == ["0", "1", "2", "3"]


@pytest.mark.slow
@pytest.mark.xdist_group("swept")
def test_unpromising_jobs_are_pruned_and_saved(swept):
    folder, done = swept
    pruned = [number for number in range(4) if read_outcome(folder / str(number)).status == "pruned"]
    assert pruned == [2, 3]  # the proposals of the seed; the first two jobs had no others to be compared with
    for number in pruned:
        run = folder / str(number)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == [0, 1]
        assert json.loads((run / "summary.json").read_text())["steps"] == 1
        assert read_checkpoint(Checkpoints(run / "checkpoints").latest()).state["step"] == 1
        assert f"job {number} pruned: val/reward/mean is" in done.stderr


@pytest.mark.slow
@pytest.mark.xdist_group("swept")
def test_the_report_can_be_printed_again(swept):
    folder, done = swept
    again = program(folder, folder, module="mtrl.sweep")
    assert again.returncode == 0 and again.stdout.splitlines()[-1] == done.stdout.splitlines()[-1]
    told = json.loads(program(folder, folder, "--json", module="mtrl.sweep").stdout)
    assert told["keys"] == ["environment.config.payoff"] and len(told["jobs"]) == 4
    assert told["best"]["number"] == told["jobs"][0]["number"]


@pytest.mark.slow
@pytest.mark.xdist_group("swept")
def test_a_sweep_that_has_had_its_trials_runs_no_more(swept):
    folder, _ = swept
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/metrics.jsonl")}
    words = ("sweep=optuna", "trainer.optimizer.lr=1e-4", "environment.config.payoff=interval(0.0,1.0)", *QUICK)
    done = program(folder.parent, *words, "hydra.sweeper.n_trials=4", "run_dir=sweep", "resume=latest")
    assert done.returncode == 0, done.stderr
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/metrics.jsonl")} == before


LAUNCHERS = {
    "joblib": ("seed=1,13,3", ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]),
    "submitit": ("seed=3,13", ["hydra/launcher=submitit_local"]),
}


@pytest.mark.parametrize(("name", "seeds", "words"), [(name, *of) for name, of in LAUNCHERS.items()], ids=LAUNCHERS)
@pytest.mark.ci
def test_jobs_side_by_side(tmp_path, name, seeds, words):
    """Jobs run in other processes with fast training. The failed job is reported, and the others are in the table."""
    pytest.importorskip(f"hydra_plugins.hydra_{name}_launcher", reason="pip install -e '.[sweep]'")
    replace_text(tmp_path / "sitecustomize.py", STAND_IN)
    done = program(tmp_path, "sweep=seeds", seeds, *words, "run_dir=sweep", run=subprocess.run)
    assert done.returncode == 1, done.stderr
    statuses = [read_outcome(folder).status for folder in sorted((tmp_path / "sweep").glob("[0-9]"))]
    assert statuses == ["finished", "failed", "finished"][: seeds.count(",") + 1]
    assert "job 1 failed: RuntimeError: out of luck" in done.stdout
    processes = {(folder / "process").read_text() for folder in (tmp_path / "sweep").glob("[0-9]")}
    assert len(processes) == 2
    assert done.stdout.splitlines()[-1] == "  mtrl train seed=3"


def test_a_signal_saves_the_jobs_of_all_workers(tmp_path):
    """Ctrl-C reaches the whole group, and joblib alone would kill jobs while they save. No job begins after it."""
    optuna = pytest.importorskip("optuna", reason="pip install -e '.[sweep]'")
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="pip install -e '.[sweep]'")
    replace_text(tmp_path / "sitecustomize.py", PATIENT)
    two = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra.sweeper.n_jobs=2", "hydra.sweeper.n_trials=4")

    def interrupted(command, capture_output, timeout, **settings):
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
        with subprocess.Popen(command, **streams, **settings) as process:
            try:
                deadline = time.monotonic() + timeout
                while len([*tmp_path.glob("sweep/*/training")]) < 2:
                    assert process.poll() is None and time.monotonic() < deadline, process.communicate()
                    time.sleep(0.05)
                os.killpg(process.pid, signal.SIGINT)
                output, errors = process.communicate(timeout=timeout)
            finally:
                process.kill()
        return subprocess.CompletedProcess(command, process.returncode, output, errors)

    done = program(tmp_path, "sweep=optuna", *two, "run_dir=sweep", run=interrupted)
    assert done.returncode == 130, done.stderr
    jobs = sorted(path for path in (tmp_path / "sweep").iterdir() if path.is_dir())
    assert [(path.name, read_outcome(path).status) for path in jobs] == [("0", "interrupted"), ("1", "interrupted")]
    assert all((path / "saved").exists() for path in jobs)
    assert "the sweep stopped; go on with: " in done.stderr
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(tmp_path / "sweep" / STUDY))
    )
    trials = optuna.load_study(study_name=NAME, storage=storage).trials
    assert [trial.state.name for trial in trials] == ["RUNNING", "RUNNING"]


def test_a_killed_worker_is_one_sentence():
    executor = pytest.importorskip("joblib.externals.loky.process_executor", reason="pip install -e '.[sweep]'")
    with pytest.raises(UserError, match="a smaller hydra.launcher.n_jobs"), stopping():
        raise executor.TerminatedWorkerError("exit codes {SIGKILL(-9)}")
    with pytest.raises(ZeroDivisionError), stopping():
        raise ZeroDivisionError


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_sweep_without_workers_ends_at_once(number):
    """Other child processes are no workers; the test has one that would run on."""
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    child.start()
    try:
        with pytest.raises(Interrupted) as ended, stopping():
            signal.raise_signal(number)
        assert ended.value.signal == signal.Signals(number).name and child.is_alive()
    finally:
        child.kill()
        child.join()
