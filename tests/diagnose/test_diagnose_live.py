"""The live diagnosis of a run: what it reports, when, and that it never stops the run by accident."""

import json
import logging
from dataclasses import asdict

import numpy as np
import pytest
from alarms import read_alarms
from made_up_runs import learning, rows

from mtrl.config.algorithm_schema import AlgorithmConfig
from mtrl.config.checks_schema import DiagnosisConfig
from mtrl.config.schema import Config, EnvironmentConfig
from mtrl.config.trainer_schema import TrainerConfig
from mtrl.diagnose.finding import Severity
from mtrl.diagnose.live import Watch
from mtrl.record.metrics import MetricsLog
from mtrl.record.run_dir import RunDir


def config(live="warn", steps=100):
    return Config(
        environment=EnvironmentConfig(name="gsm8k"),
        algorithm=AlgorithmConfig(group_size=8),
        trainer=TrainerConfig(max_steps=steps),
        diagnosis=DiagnosisConfig(live=live),
    )


@pytest.fixture
def run(tmp_path):
    return RunDir(tmp_path / "run").create()


COLLAPSE = rows(0, np.concatenate([learning(0.3, 0.7, 40), np.full(12, 0.0)]))


def watch_all(watch, made):
    return [(row["step"], finding) for row in made for finding in watch.after_step(row)]


def test_each_finding_is_reported_and_stored_once(run):
    findings = watch_all(Watch(config(), run), COLLAPSE)
    collapses = [(step, f.severity) for step, f in findings if f.rule == "collapse"]
    assert collapses[-1][1] == Severity.ALARM and len(collapses) <= 2, "once, and again if it got worse"
    assert 42 <= collapses[-1][0] <= 46
    assert read_alarms(run) == findings
    collapse = next(f for _, f in findings if f.rule == "collapse")
    assert str(collapse.change).startswith(("algorithm.", "trainer.")), "settled: it can be run as it is"


def test_a_healthy_run_gets_no_finding(run):
    findings = watch_all(Watch(config(steps=80), run), rows(1, learning(0.2, 0.9, 80)))
    assert [f for _, f in findings if f.severity != Severity.NOTE] == []


def test_only_the_mode_stop_ends_a_run(run):
    for mode, stops in (("warn", False), ("stop", True)):
        watch = Watch(config(mode), run)
        watch_all(watch, COLLAPSE)
        assert (watch.stop is not None) == stops
        (run.path / "alarms.jsonl").unlink()
    assert watch.stop.rule == "collapse"


def test_a_wide_held_out_gap_ends_a_run_in_mode_stop(run):
    held_out = dict.fromkeys(("val/success/mean", "val/success/sampled"), np.linspace(0.5, 0.3, 61))
    watch = Watch(config("stop", steps=60), run)
    findings = watch_all(watch, rows(0, np.linspace(0.3, 0.95, 60), **held_out))
    advice = next(f.advice for _, f in findings if f.rule == "held_out_gap")
    assert advice.endswith("With diagnosis.live=stop such a run ends by itself.")
    assert watch.stop.rule == "held_out_gap"


def test_the_mode_none_reports_nothing(run):
    assert watch_all(Watch(config("none"), run), COLLAPSE) == []
    assert not (run.path / "alarms.jsonl").exists()


def test_a_resumed_run_reports_only_new_findings(run):
    """The trainer truncates the metrics to the checkpoint, and then a new watch starts."""
    log, first = MetricsLog(run.metrics), Watch(config(), run)
    for row in COLLAPSE[:50]:
        log.log(row["step"], row)
        first.after_step(row)
    before = read_alarms(run)
    assert any(f.rule == "collapse" for _, f in before)
    log.truncate(45)
    second = Watch(config(), run)
    assert [step for step, _ in read_alarms(run)] == [step for step, _ in before if step <= 45]
    again = watch_all(second, COLLAPSE[46:])
    rules = [f.rule for _, f in read_alarms(run) if f.severity == Severity.ALARM]
    assert len(rules) == len(set(rules)), again


def test_a_run_that_is_set_back_removes_later_findings(run):
    watch = Watch(config(), run)
    watch_all(watch, COLLAPSE)
    findings = read_alarms(run)
    assert any(f.rule == "collapse" for _, f in findings)
    better = rows(0, learning(0.3, 0.7, 60))
    watch_all(watch, better[35:])
    assert not any(f.rule == "collapse" for _, f in read_alarms(run))


def test_a_half_written_alarm_of_a_killed_run_is_ignored(run):
    watch_all(Watch(config(), run), COLLAPSE)
    path = run.path / "alarms.jsonl"
    whole = len(read_alarms(run))
    path.write_text(path.read_text() + '{"step": 3, "rul')
    assert len(read_alarms(run)) == whole
    log = MetricsLog(run.metrics)
    for row in COLLAPSE:
        log.log(row["step"], row)
    Watch(config(), run)
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_an_alarm_with_a_line_separator_outlives_a_resumption_after_a_half_written_character(run):
    """Alarms quote conversations, and JSON does not escape U+2028."""
    path = run.path / "alarms.jsonl"
    alarm = json.dumps({"step": 3, "rule": "collapse", "severity": "alarm", "title": "a\u2028b"}, ensure_ascii=False)
    path.write_bytes(f"{alarm}\n{alarm[:-3]}".encode() + "é".encode()[:1])
    MetricsLog(run.metrics).log(3, COLLAPSE[3])
    Watch(config(), run)
    assert path.read_text(encoding="utf-8") == alarm + "\n"


def test_the_watch_never_raises_and_logs_one_failure(run, caplog):
    watch = Watch(config(), run)
    with caplog.at_level(logging.WARNING, logger="mtrl.diagnose"):
        for broken in ({}, {"step": "x"}, {"step": None}):
            assert watch.after_step(broken) == []
    assert len(caplog.records) == 1
    assert "the run goes on" in caplog.text


def test_a_folder_that_cannot_be_written_does_not_end_the_run(run, caplog):
    (run.path / "alarms.jsonl").mkdir()
    watch = Watch(config(), run)
    assert watch_all(watch, COLLAPSE) == []
    assert caplog.records


def test_the_watch_uses_the_configuration_of_the_run(run):
    watch = Watch(config(), run)
    assert watch.record.setting("algorithm.group_size") == asdict(config())["algorithm"]["group_size"]
