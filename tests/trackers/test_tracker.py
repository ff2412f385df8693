"""The tracker reports to every backend, and a failed backend does not stop the run."""

import pytest

from mtrl.record.metrics import MetricsLog
from mtrl.trackers.tracker import Tracker


class Broken:
    name = "broken"

    def log(self, step, metrics):
        raise ConnectionError("no server")

    def close(self):
        pass


def test_one_call_reaches_every_backend(tmp_path, printed):
    log = MetricsLog(tmp_path / "metrics.jsonl")

    def act(console):
        tracker = Tracker([log, console], console.warning)
        tracker.log(0, {"val/success/mean": 0.4, "val/success/pass_k_1": 0.3})
        tracker.log(1, {"rollout/reward/mean": 0.5})
        tracker.close()

    lines = printed(act).splitlines()
    assert [row["step"] for row in log.read()] == [0, 1]
    assert len(lines) == 2  # titles and step 1: an evaluation alone is no training step
    assert lines[1].split()[:4] == ["1", "0.500", "–", "30.0%"]


def test_a_failing_backend_is_counted_and_named_once(tmp_path):
    warnings = []
    log = MetricsLog(tmp_path / "metrics.jsonl")
    tracker = Tracker([Broken(), log], warnings.append)
    for step in range(3):
        tracker.log(step, {})
    assert len(log.read()) == 3 and tracker.failures["broken"] == 3
    assert warnings == ["broken failed and the run continues without it: ConnectionError: no server"]
    tracker.close()
    assert warnings[1:] == ["broken failed 3 times in this run"]


def test_a_failed_warning_stops_nothing():
    def warn(_):
        raise OSError("terminal gone")

    tracker = Tracker([Broken()], warn)
    tracker.log(0, {})
    assert tracker.failures == {"broken": 1, "warn": 1}


def test_an_interrupt_is_not_swallowed():
    class Interrupted(Broken):
        def log(self, step, metrics):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Tracker([Interrupted()], print).log(0, {})


def test_a_backend_cannot_change_what_the_next_one_sees(tmp_path):
    class Greedy(Broken):
        def log(self, step, metrics):
            metrics.clear()

    log = MetricsLog(tmp_path / "metrics.jsonl")
    Tracker([Greedy(), log], print).log(1, {"a": 1})
    assert log.read() == [{"step": 1, "a": 1}]
