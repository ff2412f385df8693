"""Small generated runs, and a viewer that serves them in a process of its own."""

import json
import os
import random
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx

import mtrl
from mtrl.record.trajectories import write_groups
from mtrl.types import FinishReason, Group, StopReason, Trajectory, Turn
from tests import forked

ROOT = Path(mtrl.__file__).parent.parent
TOKEN = "a-token-of-the-tests"
HOSTILE = '</script><script>alert(1)</script><img src=x onerror=alert(1)> \x1b[31m \u2028 & "quoted" \\'


def make_turn(text="go", tokens=3, reward=0.0, observed="look", **more):
    values = {
        "observation_ids": [1, 2],
        "action_ids": list(range(tokens)),
        "action_logprobs": [-0.5] * tokens,
        "version_spans": [(0, tokens)],
        "finish": FinishReason.STOP,
        "text": text,
        "message": {"role": "assistant", "content": text},
        "observation": [{"role": "user", "content": observed}],
        "reward": reward,
    }
    return Turn(**{**values, **more})


def make_trajectory(task="t", group="g", index=0, rewards=(0.0, 1.0), score=None, **more):
    turns = [make_turn(text=f"say {n}", reward=reward) for n, reward in enumerate(rewards)]
    values = {"turns": turns, "stop_reason": StopReason.DONE, "score": score}
    return Trajectory(task, group, index, **{**values, **more})


def random_trajectory(rng, group, index):
    """Return a random trajectory, which may be failed, cut, without a score, or without an advantage."""
    turns = [
        make_turn(
            text=rng.choice(["apple", "Apple pie", "pear", "nothing"]),
            tokens=(tokens := rng.randrange(5)),
            reward=rng.choice([0.0, 0.5, 1.0]),
            finish=rng.choice([FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH]),
            advantages=rng.choice([[], [0.0], [0.3], [-1.5]]) if tokens else [],
            trainer_logprobs=[-0.5 + rng.choice([0.0, 0.25])] * tokens,
            components={"form": 0.5},
            seconds_generate=rng.choice([0.0, 0.5]),
        )
        for _ in range(rng.randrange(1, 5))
    ]
    return Trajectory(
        rng.choice(["task-a", "task-b", "Task, with a comma"]), group, index, turns,
        rng.choice(list(StopReason)), score=rng.choice([None, 0.0, 0.5, 1.0]), trainable=rng.random() < 0.8,
        error=rng.choice([None, None, "Traceback\nValueError: no"]),
    )  # fmt: skip


def make_run(path, steps=3, groups=3, size=4, seed=0, config=None, name="made"):
    """Write a run of a few files."""
    rng = random.Random(seed)
    (path / "trajectories").mkdir(parents=True, exist_ok=True)
    for step in range(1, steps + 1):
        for kind in ("train", "eval_greedy") if step % 2 else ("train",):
            made = [
                Group(f"{kind}{step}/{g}", {}, [random_trajectory(rng, f"{kind}{step}/{g}", n) for n in range(size)])
                for g in range(groups)
            ]
            write_groups(path / "trajectories", kind, step, made)
    rows = [{"step": n, "rollout/reward/mean": n / 10, "val/success/mean": 0.5} for n in range(steps + 1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    tree = {"name": name, "seed": seed, "run_dir": str(path), "trainer": {"max_steps": steps}, **(config or {})}
    (path / "config.yaml").write_text(json.dumps(tree), encoding="utf-8")  # JSON is YAML
    return path


@contextmanager
def viewing(*words, token=TOKEN):
    """Run `mtrl view` in a process of its own, and yield its address and a client with the token."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MTRL_VIEW_TOKEN": token}
    command = [sys.executable, "-m", "mtrl.view", *map(str, words), "--no-browser"]
    process = forked.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        line = process.stdout.readline()
        assert " at http://127.0.0.1:" in line, line + process.stderr.read()
        address = line.split(" at ")[1].split("/?")[0]
        with httpx.Client(base_url=address, headers={"Authorization": f"Bearer {token}"}, timeout=120) as client:
            yield client
    finally:
        process.terminate()
        process.communicate(timeout=120)
