"""Followers: everything arrives in order after failures and kills, and the run never waits."""

import json
import os
import subprocess
import sys
import textwrap
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from follow_runs import (
    HOSTILE,
    Memory,
    add_step,
    add_trajectories,
    follow,
    keys,
    make_run,
    row,
    tool_episode,
    tracker,
    with_trackers,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from mtrl.config.schema import TrackerConfig
from mtrl.errors import UserError
from mtrl.record.metrics import MetricsLog
from mtrl.trackers import check_trackers, followers, start_followers
from mtrl.trackers.backend import RefusedItemError, ReopenError
from mtrl.trackers.folder import Reading
from mtrl.trackers.follower import Follower
from mtrl.trackers.items import Whole, step_of
from mtrl.trackers.receipts import BusyError, Receipts, folder_of, read_remote
from mtrl.trackers.start import follower_of

# -- new pieces -------------------------------------------------------------------------------------------------------


def test_everything_is_sent_once_and_in_order(tmp_path):
    run, store = make_run(tmp_path / "run", steps=3), []
    follower = follow(run, store)
    follower.advance()
    assert keys(store) == [
        "config.yaml",
        *(f"metrics.jsonl:{step}" for step in range(3)),
        *(f"trajectories/train_step_000000.jsonl:{line}" for line in (1, 2, 3)),
        *(f"trajectories/train_step_000002.jsonl:{line}" for line in (1, 2, 3)),
    ]
    assert follower.advance() == 0
    add_step(run, 3)
    follower.advance()
    assert keys(store)[10:] == ["metrics.jsonl:3"]
    follower.release()
    again = follow(run, store)  # another process
    assert again.advance() == 0
    assert again.left() == {"files": 1}  # config.yaml as it is


def test_files_are_sent_last_and_once(tmp_path):
    run, store = make_run(tmp_path / "run", steps=1), []
    run.write_summary({})
    follower = follow(run, store)
    follower.advance()
    assert not any(key.startswith("file ") for key in keys(store))
    follower.advance(final=True)
    assert keys(store)[-3:] == ["file config.yaml", "file summary.json", "end"]
    assert store[-1].finished
    assert follower.advance(final=True) == 0 and follower.left() == {}


def test_a_run_that_stopped_is_not_finished(tmp_path):
    run, store = make_run(tmp_path / "run", steps=1), []
    follow(run, store).advance(final=True)
    assert "end" not in keys(store)  # the run may still be running
    follower = Follower(Memory(store), make_run(tmp_path / "other", steps=1), 0, Reading(64))
    follower.advance(final=True, is_over=True)
    assert store[-1].key == "end" and not store[-1].finished


def test_a_run_that_wrote_its_summary_early_was_stopped(tmp_path):
    run, store = make_run(tmp_path / "run", steps=2), []
    run.config.write_text("trainer:\n  max_steps: 2\n")
    run.write_summary({"steps": 1})
    follow(run, store).advance(final=True)
    assert store[-1].key == "end" and not store[-1].finished


@pytest.mark.parametrize("status", ["finished", "stopped"])
def test_a_copy_is_over_by_its_status_whatever_the_times_of_its_files(tmp_path, status):
    run, store = make_run(tmp_path / "run", steps=2), []
    run.config.write_text("trainer:\n  max_steps: 2\n")
    run.write_summary({"steps": 1})
    os.utime(run.path / "summary.json", (0, 0))
    follower = follow(run, store)
    run.status.write_text("running\n")
    assert not follower.folder.run.is_over
    run.status.write_text(f"{status}\n")
    assert follower.folder.run.is_over
    follower.advance(final=True)
    assert store[-1].key == "end" and store[-1].finished == (status == "finished")


def test_an_evaluation_of_an_early_step_is_finished(tmp_path):
    run, store = make_run(tmp_path / "evaluation", steps=1), []
    run.config.write_text("trainer:\n  max_steps: 20\n")
    for name in ("models.json", "report.json"):
        (run.path / name).write_text("[]")
    follow(run, store).advance(final=True)
    assert store[-1].key == "end" and store[-1].finished


def test_trajectories_wait_for_the_row_of_their_step(tmp_path):
    run, store = make_run(tmp_path / "run", steps=1), []
    add_trajectories(run, 1, [tool_episode()], kind="eval_greedy")
    follower = follow(run, store)
    follower.advance()
    assert not any("eval_greedy" in key for key in keys(store))
    add_step(run, 1)
    follower.advance()
    assert keys(store)[-1] == "trajectories/eval_greedy_step_000001.jsonl:1"
    assert (store[-1].kind, store[-1].step, store[-1].verdict) == ("eval_greedy", 1, "agree")


def test_the_number_of_trajectories_per_file_is_limited(tmp_path):
    run, store = make_run(tmp_path / "run", steps=1), []
    few = Follower(Memory(store), run, 0, Reading(2))
    few.advance()
    assert sum("trajectories" in key for key in keys(store)) == 2
    few.release()
    more = Follower(Memory(store), run, 0, Reading(3))
    more.advance()
    assert keys(store)[-1] == "trajectories/train_step_000000.jsonl:3"


def test_a_half_written_row_is_left_out(tmp_path):
    run, store = make_run(tmp_path / "run", steps=1), []
    follower = follow(run, store)
    with run.metrics.open("a") as file:
        file.write('{"step": 1, "a": 1')
        file.flush()
        follower.advance()
        assert keys(store)[1:2] == ["metrics.jsonl:0"] and "metrics.jsonl:1" not in keys(store)
        file.write("}\n")
    follower.advance()
    assert store[-1].metrics == {"a": 1.0}


def test_an_unfinished_row_is_reported_once_at_the_end_of_the_run(tmp_path):
    run, warned = make_run(tmp_path / "run", steps=2), []
    elsewhere = Memory([])
    elsewhere.destination = "elsewhere"
    both = followers.Followers([follow(run, []), Follower(elsewhere, run, 0, Reading(64))], warned.append)
    with run.metrics.open("a") as file:
        file.write('{"step": 2, "a": 1')
    both.poke()
    assert warned == []
    both.close()
    assert [sentence.split(",")[0] for sentence in warned] == [f"{run.metrics}:3 has no end"]


def test_values_that_are_not_numbers_are_left_out(tmp_path):
    run, store = make_run(tmp_path / "run"), []
    MetricsLog(run.metrics).log(0, {"a": float("nan"), "b": "text", "c": True, "d": 2})
    follow(run, store).advance()
    assert store[-1].metrics == {"c": 1.0, "d": 2.0}


def test_numbers_that_are_too_large_end_no_follower(tmp_path):
    run, store = make_run(tmp_path / "run"), []
    rows = ({"step": n, "huge": 10**400, "fine": 1.0, "time/step": 1e308} for n in range(3))
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    follow(run, store).advance()
    assert [item.metrics for item in store if hasattr(item, "metrics")] == 3 * [{"fine": 1.0, "time/step": 1e308}]


def test_the_clock_of_a_row_is_that_of_the_run(tmp_path):
    run, store = make_run(tmp_path / "run"), []
    for step in range(3):
        add_step(run, step, **{"time/evaluate": 0.5})
    Follower(Memory(store), run, 10_000, Reading(0)).advance()
    assert [item.milliseconds for item in store[1:]] == [12_000, 14_000, 16_000]


# -- a resumed run -----------------------------------------------------------------------------------------------------


def rewind(run, step):
    log = MetricsLog(run.metrics)
    log.truncate(step)
    log.close()


def test_repeated_steps_with_equal_values_are_not_sent_again(tmp_path):
    run, store = make_run(tmp_path / "run", steps=4), []
    follower = follow(run, store)
    follower.advance()
    rewind(run, 1)
    for step in (2, 3):
        add_step(run, step, **{"time/step": 9.0, "perf/tokens_per_second": 1.0})  # the clock is another
    assert follower.advance() == 0
    add_step(run, 4)
    follower.advance()
    assert [key for key in keys(store) if key.startswith("metrics")] == [f"metrics.jsonl:{n}" for n in range(5)]


def test_repeated_steps_with_other_values_are_sent(tmp_path):
    run, store = make_run(tmp_path / "run", steps=4), []
    follower = follow(run, store)
    follower.advance()
    rewind(run, 1)
    add_step(run, 2)
    add_step(run, 3, **{"train/loss": 7.0})
    follower.advance()
    assert keys(store)[-1] == "metrics.jsonl:3" and store[-1].metrics["train/loss"] == 7.0
    assert keys(store).count("metrics.jsonl:2") == 1 and keys(store).count("metrics.jsonl:3") == 2


# -- failures ----------------------------------------------------------------------------------------------------------

ACT = st.one_of(
    st.tuples(st.just("step"), st.booleans()),
    st.tuples(st.just("advance"), st.lists(st.sampled_from(["ok", "down", "late"]), max_size=6)),
    st.tuples(st.just("kill"), st.integers(0, 40)),
    st.tuples(st.just("resume"), st.integers(0, 5)),
)


@settings(max_examples=200, deadline=None)
@given(acts=st.lists(ACT, max_size=14), at_once=st.sampled_from([None, 1, 2]))
def test_nothing_is_lost_and_the_order_stays_after_any_failure(tmp_path_factory, acts, at_once):
    run, store = make_run(tmp_path_factory.mktemp("runs") / "run"), []
    follower, step, doubt = follow(run, store, episodes_at_once=at_once), 0, False
    for act, detail in acts:
        if act == "step":
            add_step(run, step, seed=float(detail))
            step += 1
        elif act == "advance":
            follower.backend.plan = list(detail)
            doubt = doubt or "late" in detail
            with suppress(OSError):
                follower.advance()
        elif act == "kill":  # the process ends at once, and takes some bytes of the journal with it
            follower.release()
            journal = follower.receipts.path
            lost = min(detail, journal.stat().st_size)
            doubt = doubt or lost > 0
            os.truncate(journal, journal.stat().st_size - lost)
            follower = follow(run, store, episodes_at_once=at_once)
        elif act == "resume" and detail < step:
            rewind(run, detail)
            step = detail + 1
    follower.backend.plan = []
    follower.advance(final=True, is_over=True)

    assert follower.left() == {}
    latest = {item.key: item for item in store}
    for line in map(json.loads, run.metrics.read_text().splitlines() if run.metrics.exists() else []):
        number = line.pop("step")
        assert latest[f"metrics.jsonl:{number}"].metrics == pytest.approx(line)
    for path in run.trajectories.glob("*.jsonl"):
        assert all(f"trajectories/{path.name}:{n}" in latest for n in (1, 2, 3))
    first = list(dict.fromkeys(keys(store)))
    steps = [step_of(key) for key in first if key.startswith("metrics")]
    assert steps == sorted(steps)
    if not doubt:
        sent = [(item.key, item.digest) for item in store]
        assert len(sent) == len(set(sent)) or any(act == "resume" for act, _ in acts)


def test_a_refused_piece_does_not_block_the_others(tmp_path):
    class Picky(Memory):
        def send_rows(self, rows):
            if any(row.step == 1 for row in rows):
                raise RefusedItemError("not this one")
            super().send_rows(rows)

    run, store = make_run(tmp_path / "run", steps=3), []
    follower = Follower(Picky(store), run, 0, Reading(64))
    follower.advance()
    assert [key for key in keys(store) if key.startswith("metrics")] == ["metrics.jsonl:0", "metrics.jsonl:2"]
    assert follower.receipts.refused == {"metrics.jsonl:1": "not this one"}
    assert follower.advance() == 0


def test_lines_that_are_no_trajectory_are_reported_and_left_out(tmp_path):
    run, store = make_run(tmp_path / "run", steps=1), []
    path = run.trajectories / "train_step_000000.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + '{"turns": 3}\n' + "[" * 100_000 + "\n" + lines[1])
    follower = follow(run, store)
    follower.advance()
    assert keys(store)[-2:] == [f"trajectories/{path.name}:{line}" for line in (1, 4)]
    assert sorted(follower.receipts.refused) == [f"trajectories/{path.name}:{line}" for line in (2, 3)]


def test_hostile_text_survives_the_journal(tmp_path):
    run, store = make_run(tmp_path / "run"), []
    add_trajectories(run, 0, [tool_episode(task=HOSTILE, text=HOSTILE)])
    MetricsLog(run.metrics).log(0, {HOSTILE: 1.0})
    follow(run, store).advance()
    assert store[-1].trajectory.turns[1].text == HOSTILE


def test_a_tracker_that_cannot_repeat_steps_is_reopened(tmp_path):
    class Forward(Memory):
        opened = ()
        last = -1

        def open(self, receipts, first_step):
            self.opened += (first_step,)
            self.last = -1

        def send_rows(self, rows):
            for one in rows:
                if one.step <= self.last:
                    raise ReopenError
                self.last = one.step
            super().send_rows(rows)

    run, store = make_run(tmp_path / "run", steps=3), []
    follower = Follower(Forward(store), run, 0, Reading(64))
    follower.advance()
    rewind(run, 0)
    add_step(run, 1, **{"train/loss": 3.0})
    follower.advance()
    assert follower.backend.opened == (0, 1)


def test_one_process_at_a_time(tmp_path):
    run = make_run(tmp_path / "run")
    first = follow(run, [])
    with pytest.raises(BusyError):
        follow(run, [])
    first.release()
    follow(run, []).release()


def test_a_run_that_another_process_sends_warns_and_continues(tmp_path):
    run, warnings = make_run(tmp_path / "run"), []
    holder = follower_of("tensorboard", run, tracker("tensorboard"))
    group = start_followers(with_trackers("tensorboard"), run, warnings.append)
    group.poke()
    group.close()
    holder.release()
    assert warnings == ["tensorboard is already being sent this run by another process"]
    assert group.urls() == {}


def test_another_destination_has_its_own_journal(tmp_path):
    here, there = (Receipts(tmp_path, "mlflow", uri) for uri in ("http://a", "http://b"))
    here.remember(run_id="1")
    assert here.path != there.path and there.remote == {}


def test_names_of_a_run_are_read_after_any_refusal(tmp_path):
    """JSON does not escape U+2028, at which `str.splitlines` ends a line."""
    receipts = Receipts(tmp_path, "mlflow", "http://a")
    receipts.refuse(Whole("a\u2028b", "0"), "no")
    receipts.remember(run_id="1")
    assert read_remote(tmp_path, "mlflow", "http://a") == {"run_id": "1"}


# -- during a run -----------------------------------------------------------------------------------------------


def test_a_hanging_tracker_never_delays_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(followers, "SILENT_SECONDS", 0.2)
    forever = threading.Event()

    class Hanging(Memory):
        def open(self, receipts, first_step):
            forever.wait()

    run, warnings = make_run(tmp_path / "run", steps=2), []
    group = followers.Followers([Follower(Hanging([]), run, 0, Reading(64))], warnings.append)
    group.poke()
    assert warnings == []
    group.close()
    forever.set()
    assert len(warnings) == 1
    assert "left: 2 rows, 3 trajectories, 2 files" in warnings[0]
    assert f"mtrl track {run.path}" in warnings[0]


def test_a_failure_and_its_end_are_reported_once(tmp_path, monkeypatch):
    monkeypatch.setattr(followers, "FIRST_DELAY", 0.01)
    monkeypatch.setattr(followers, "LONGEST_DELAY", 0.01)
    run, warnings, store = make_run(tmp_path / "run", steps=2), [], []
    follower = follow(run, store)
    follower.backend.plan = ["ok", "down", "down", "late"]
    group = followers.Followers([follower], warnings.append)
    while follower.backend.plan:
        group.poke()
    group.close()
    assert len(warnings) == 2
    assert warnings[0].startswith("memory cannot be reached") and "ConnectionError: down" in warnings[0]
    assert warnings[1].startswith("memory answers again")
    assert {f"metrics.jsonl:{n}" for n in (0, 1)} <= set(keys(store))
    assert store[-1].key == "end"


def test_the_rest_is_sent_at_the_end_of_the_run(tmp_path):
    run, warnings, store = make_run(tmp_path / "run", steps=2), [], []
    follower = follow(run, store)
    follower.backend.plan = ["down"]
    group = followers.Followers([follower], warnings.append)
    group.close()
    assert follower.left() == {} and store[-1].key == "end"


@pytest.mark.slow
def test_a_process_killed_at_any_instant_loses_nothing(tmp_path):
    """Steps are made and sent by a process that is killed by SIGKILL in the middle; the next one sends the rest."""
    run = make_run(tmp_path / "run")
    code = """
        import os, signal, sys
        sys.path[:0] = [{tests!r}]
        from follow_runs import add_step, with_trackers
        from mtrl.trackers import start_followers
        from mtrl.record.run_dir import RunDir
        run = RunDir({run!r})
        group = start_followers(with_trackers("tensorboard"), run, print)
        for step in range(6):
            add_step(run, step)
            group.poke()
        while not any("metrics" in path.read_text() for path in run.path.glob("trackers/tensorboard-*")):
            group.poke()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    pytest.importorskip("tensorboard")
    text = textwrap.dedent(code).format(tests=str(Path(__file__).parent), run=str(run.path))
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
    assert done.returncode == -9, done.stderr
    follower = follower_of("tensorboard", run, tracker("tensorboard"))
    follower.advance(final=True, is_over=True)
    follower.close()
    assert follower.left() == {}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(6))


# -- settings ----------------------------------------------------------------------------------------------------------


def checked(**changes):
    cfg = OmegaConf.create({"tracker": OmegaConf.structured(TrackerConfig)})
    for key, value in changes.items():
        OmegaConf.update(cfg.tracker, key.replace("__", "."), value)
    return check_trackers(cfg)


def test_an_unknown_tracker_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match=r"tracker.report_to=mlflo is not known; did you mean mlflow\?"):
        checked(report_to=["mlflo"])


def test_a_missing_package_is_reported_with_its_extra(monkeypatch):
    monkeypatch.setattr("mtrl.trackers.start.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"wandb is not installed; install it with: pip install 'mtrl-agents\[wandb\]'"):
        checked(report_to=["wandb"])


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"mlflow__uri": "localhost:5000"}, "write http://HOST:PORT"),
    ],
)
def test_values_that_do_not_fit_are_refused(changes, error):
    with pytest.raises(UserError, match=error):
        checked(**changes)


def test_unused_settings_cause_a_warning():
    assert checked() == []
    settings = ["tracker.mlflow.uri=http://127.0.0.1:1", "tracker.project=mine"]
    warnings = checked(mlflow__uri="http://127.0.0.1:1", project="mine")
    assert warnings == [f"{setting} has no effect with tracker.report_to=[]" for setting in settings]
    assert checked(project="mine", report_to=["wandb"]) == []


def test_the_journal_is_in_the_folder_of_the_run(tmp_path):
    run = make_run(tmp_path / "run", steps=1)
    follow(run, []).advance()
    assert [path.name.partition("-")[0] for path in folder_of(run).iterdir()] == ["memory"]
    assert row(0)["rollout/reward/mean"] == 0.0
