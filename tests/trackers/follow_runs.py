"""Generated folders of runs for the tests of the followers."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

from mtrl.config.schema import Config, TrackerConfig
from mtrl.record.metrics import MetricsLog
from mtrl.record.run_dir import RunDir
from mtrl.trackers.folder import Reading
from mtrl.trackers.follower import Follower
from mtrl.types import FinishReason, StopReason, Trajectory, Turn

HOSTILE = "\x1b[2J\ud800 <script>alert(1)</script> \0 end"


def row(step, **other):
    """Return the metrics of one step."""
    return {"rollout/reward/mean": step / 10, "train/loss": 1 / (1 + step), "time/step": 1.5, **other}


def tool_episode(task="task-0", text="the answer is 12", reward=1.0, score=1.0):
    """Return a trajectory of two turns, of which the first calls a tool."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 5, "b": 7}'}}
    turns = [
        Turn(
            [1, 2, 3], [4, 5], [-0.5, -0.25], [(0, 2)], FinishReason.STOP, "",
            {"role": "assistant", "content": "", "tool_calls": [call]},
            [{"role": "user", "content": "what is 5 + 7?"}],
            0.25, {"format": 0.25}, seconds_generate=2.0, seconds_environment=1.0, advantages=[0.5],
        ),
        Turn(
            [6], [7, 8, 9], [-0.1, -0.2, -0.3], [(0, 3)], FinishReason.STOP, text,
            {"role": "assistant", "content": text},
            [{"role": "tool", "tool_call_id": "c1", "content": "12"}],
            reward - 0.25, {"correct": reward - 0.25}, seconds_generate=1.0,
        ),
    ]  # fmt: skip
    return Trajectory(task, f"group of {task}", 0, turns, StopReason.DONE, score=score)


def make_run(folder, steps=0, name="gsm8k"):
    """Write a run with some steps, and with trajectories of the even steps."""
    run = RunDir(folder).create()
    run.config.write_text(f"name: {name}\nseed: 3\nenvironment:\n  name: {name}\ntrainer:\n  optimizer:\n    lr: 0.5\n")
    for step in range(steps):
        add_step(run, step)
    return run


def add_step(run, step, **other):
    if step % 2 == 0:
        add_trajectories(run, step, [tool_episode(f"task-{n}") for n in range(3)])
    log = MetricsLog(run.metrics)
    log.log(step, row(step, **other))
    log.close()


def add_trajectories(run, step, trajectories, kind="train"):
    path = run.trajectories / f"{kind}_step_{step:06d}.jsonl"
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(asdict(trajectory)) + "\n" for trajectory in trajectories))
    os.replace(part, path)
    return path


def tracker(*report_to, **mlflow):
    config = TrackerConfig(report_to=list(report_to))
    for key, value in mlflow.items():
        setattr(config.mlflow, key, value)
    return config


def with_trackers(*report_to, **mlflow):
    config = Config()
    config.tracker = tracker(*report_to, **mlflow)
    return config


def steps_of(run):
    return [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]


class Memory:
    """A tracker that appends the sent items to given lists, and fails as planned."""

    name = "memory"
    place = None
    destination = "here"
    is_buffered = False

    def __init__(self, store, episodes_at_once=2):
        self.store, self.episodes_at_once = store, episodes_at_once
        self.plan = []
        """Outcomes of the next calls: ok | down (nothing is received) | late (the answer to an item is lost)."""

    def url(self, remote):
        return "memory"

    def hint(self, remote):
        return ""

    def open(self, receipts, first_step):
        self.call([])

    def call(self, items):
        outcome = self.plan.pop(0) if self.plan else "ok"
        if outcome == "down":
            raise ConnectionError("down")
        self.store.extend(items)
        if outcome == "late":
            raise TimeoutError("late")

    def send_settings(self, settings):
        self.call([settings])

    def send_rows(self, rows):
        self.call(rows)

    def send_episodes(self, episodes):
        self.call(episodes)

    def send_artifact(self, artifact):
        self.call([artifact])

    def send_ended(self, ended):
        self.call([ended])

    def close(self):
        pass


def follow(run, store, **options):
    return Follower(Memory(store, **options), run, 0, Reading(64))


def keys(store):
    return [item.key for item in store]
