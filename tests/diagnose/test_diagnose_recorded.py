"""Real runs with and without faults are diagnosed correctly, at their end and at every step. `experiments/diagnosis`
makes the runs; `recorded/` has their metrics."""

import os
import shutil
import sys
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest
from alarms import read_alarms
from omegaconf import OmegaConf

import mtrl
from experiments.diagnosis.record import read_runs
from mtrl.config.schema import Config
from mtrl.diagnose.finding import Severity
from mtrl.diagnose.live import Watch
from mtrl.diagnose.record import Record
from mtrl.diagnose.walk import walk
from mtrl.record.metrics import MetricsLog
from mtrl.record.run_dir import RunDir
from mtrl.record.stored import read
from tests import forked
from tests.small_models import SMALLER_POLICY

ROOT = Path(mtrl.__file__).parent.parent
RECORDED = Path(__file__).parent / "recorded"
ILL = {
    "unread": ("flat_from_start", Severity.ALARM),
    "saturated": ("equal_groups", Severity.ALARM),
    "hacked_0": ("hacked_reward", Severity.ALARM),
    "hacked_1": ("hacked_reward", Severity.ALARM),
    "hacked_2": ("hacked_reward", Severity.ALARM),
    "marker": ("hacked_reward", Severity.ALARM),
    "collapsed": ("collapse", Severity.ALARM),
    "stalled": ("stall", Severity.WARNING),
}
"""First finding and its severity, by run."""
HACKED = [name for name, (rule, _) in ILL.items() if rule == "hacked_reward"]
HEALTHY = ("healthy_gsm8k", "healthy_text_to_sql", "healthy_games")


def requiring_action(findings):
    """Return the alarms and warnings."""
    return [finding for finding in findings if finding.severity != Severity.NOTE]


@pytest.fixture(scope="module")
def fed(tmp_path_factory):
    """`fed(name)`: `(step, finding)` for all findings that the watch reports on the recorded rows."""
    return cache(lambda name: _fed(name, tmp_path_factory.mktemp(name) / "run"))


def _fed(name, folder):
    shutil.copytree(RECORDED / name, folder, ignore=shutil.ignore_patterns("metrics.jsonl"))
    run = RunDir(folder)
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(run.config)))
    watch = Watch(config, run)
    rows = MetricsLog(RECORDED / name / "metrics.jsonl").read()
    found = [(row["step"], finding) for row in rows for finding in watch.after_step(row)]
    assert read_alarms(run) == found
    return found


def test_every_symptom_has_a_recorded_run():
    five = {"flat_from_start", "equal_groups", "hacked_reward", "collapse", "stall"}
    assert {rule for rule, _ in ILL.values()} == five
    assert {path.name for path in RECORDED.iterdir()} == {*ILL, *HEALTHY}


@pytest.mark.parametrize("name", ILL)
def test_the_first_finding_of_a_faulty_run_is_its_symptom(name):
    diagnosis = walk(Record.load(RECORDED / name))
    assert not diagnosis.broken
    assert (diagnosis.findings[0].rule, diagnosis.findings[0].severity) == ILL[name]


@pytest.mark.parametrize("name", ILL)
def test_the_symptom_is_reported_during_the_run(name, fed):
    """It is also the first alarm; a stall is a warning, and its run gets no alarm."""
    found = fed(name)
    assert ILL[name] in [(finding.rule, finding.severity) for _, finding in found]
    alarms = [finding.rule for _, finding in found if finding.severity == Severity.ALARM]
    assert alarms[:1] == ([ILL[name][0]] if ILL[name][1] == Severity.ALARM else [])


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_gets_no_alarm_and_no_warning(name, fed):
    assert MetricsLog(RECORDED / name / "metrics.jsonl").read()[-1]["val/success/mean"] > 0.6
    assert not requiring_action(walk(Record.load(RECORDED / name)).findings)
    assert not requiring_action(finding for _, finding in fed(name))


@pytest.mark.parametrize("name", HACKED)
def test_a_hacked_reward_raises_an_alarm_within_30_steps(name, fed):
    alarms = [step for step, f in fed(name) if f.rule == "hacked_reward" and f.severity == "alarm"]
    assert 0 < alarms[0] <= 30


@pytest.mark.parametrize("name", HACKED)
def test_in_the_hacked_runs_the_reward_rose_and_success_did_not(name):
    """This property makes the runs valid cases for the tests above."""
    rows = MetricsLog(RECORDED / name / "metrics.jsonl").read()

    def rise(key, width=1):
        values = [row[key] for row in rows if key in row]
        return fmean(values[-width:]) - fmean(values[:width])

    assert rise("rollout/reward/mean", 3) > 0.2 and rise("val/reward/sampled") > 0.2
    assert abs(rise("rollout/success/mean", 3)) < 0.1 and rise("val/success/sampled") < 0.1
    assert rise("val/success/mean") < 0.1


def test_the_report_names_the_trajectories_that_exploit_the_reward():
    """Each FILE:LINE is a trajectory with full reward that the scorer rejects."""
    run = RECORDED / "hacked_0"
    (finding,) = (f for f in walk(Record.load(run)).findings if f.rule == "hacked_reward")
    assert finding.witnesses
    for witness in finding.witnesses:
        file, _, line = witness.where.rpartition(":")
        (guilty,) = (stored.trajectory for stored in read(run / file) if stored.line == int(line))
        assert guilty.reward >= 1.0 and guilty.score == 0.0
    shown = diagnose(run).stdout
    assert all(witness.where in shown for witness in finding.witnesses)


def diagnose(run):
    """Run the program."""
    return forked.run(
        [sys.executable, "-m", "mtrl.diagnose", str(run)], cwd=ROOT, capture_output=True, text=True, check=False
    )


SHORTER = [
    *SMALLER_POLICY,
    "model.warm_start.check_every=75",
    "trainer.optimizer.lr=1e-3",
    "trainer.max_steps=20",
    "evaluation.rows=20",
    "evaluation.sampled_rows=0",
    "diagnosis.live=stop",
]


@pytest.mark.slow
@pytest.mark.ci
def test_training_on_the_lenient_reward_raises_the_alarm(tmp_path):
    """End to end without recorded data: a policy of half the width exploits the reward, and the run reports it and
    ends."""
    (recorded,) = (run for run in read_runs(ROOT / "experiments" / "diagnosis" / "runs.yaml") if run.name == "hacked_0")
    run = RunDir(tmp_path / "run")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = [*recorded.words(run.path), *SHORTER]
    done = forked.run(words, env=environment, capture_output=True, text=True)
    (step, alarm) = next((step, f) for step, f in read_alarms(run) if f.severity == Severity.ALARM)
    assert alarm.rule == "hacked_reward" and step <= 20 and alarm.witnesses
    assert done.returncode != 0 and "hacked" in done.stdout + done.stderr  # diagnosis.live=stop
    shown = diagnose(run.path).stdout
    assert all(witness.where in shown for witness in alarm.witnesses)
