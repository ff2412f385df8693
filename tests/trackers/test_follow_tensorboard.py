"""TensorBoard: the event files are read back by TensorBoard itself."""

import pytest
from follow_runs import HOSTILE, add_step, add_trajectories, make_run, tool_episode, tracker

pytest.importorskip("tensorboard")

from mtrl.record.metrics import MetricsLog
from mtrl.trackers.start import follower_of


def events_of(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run.path / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def steps(run, tag="train/loss"):
    return [event.step for event in events_of(run).Scalars(tag)]


def text(run, tag):
    return events_of(run).Tensors(f"{tag}/text_summary")[0].tensor_proto.string_val[0].decode()


def send(run, close=True):
    follower = follower_of("tensorboard", run, tracker("tensorboard"))
    follower.advance(final=True)
    if close:
        follower.close()
    assert follower.left() == {}
    follower.release()
    return follower


def test_metrics_and_conversations_arrive(tmp_path):
    run = make_run(tmp_path / "run", steps=4)
    lenient = tool_episode("task-x", f"# title\n{HOSTILE}", reward=2.0, score=0.0)
    add_trajectories(run, 2, [lenient, tool_episode("task-y", reward=0.5)], kind="eval_greedy")
    follower = send(run)
    assert steps(run) == [0, 1, 2, 3]
    best = text(run, "eval_greedy/best")
    assert "task-x: reward +2.00, score 0, lenient, done" in best and "what is 5 + 7?" in best
    assert all(line.startswith("    ") for line in best.split("\n")), "else it would be Markdown"
    assert "\x1b" not in best
    assert "task-y" in text(run, "eval_greedy/worst") and "task-x" in text(run, "eval_greedy/lenient")
    assert "trainer.optimizer.lr: 0.5" in text(run, "config")
    assert follower.url() == str(run.path / "tensorboard")


def test_a_resumed_run_replaces_repeated_steps(tmp_path):
    run = make_run(tmp_path / "run", steps=5)
    send(run)
    log = MetricsLog(run.metrics)
    log.truncate(1)
    log.close()
    for step in (2, 3):
        add_step(run, step, **{"train/loss": 9.0})
    send(run)
    events = events_of(run).Scalars("train/loss")
    assert [event.step for event in events] == [0, 1, 2, 3]
    assert [event.value for event in events[2:]] == [9.0, 9.0]


def test_repeated_rows_are_shown_once(tmp_path):
    """The process is killed after it has written the event file and before the journal."""
    run = make_run(tmp_path / "run", steps=3)
    follower = send(run, close=False)
    lines = follower.receipts.path.read_text().splitlines(keepends=True)
    count = next(n for n, line in enumerate(lines) if "metrics.jsonl:1" in line)
    follower.receipts.path.write_text("".join(lines[:count]))
    add_step(run, 3)
    send(run)
    assert steps(run) == [0, 1, 2, 3]


def test_removed_event_files_are_written_again(tmp_path):
    run = make_run(tmp_path / "run", steps=2)
    send(run)
    for path in (run.path / "tensorboard").iterdir():
        path.unlink()
    add_step(run, 2)
    send(run)
    assert steps(run) == [0, 1, 2]
