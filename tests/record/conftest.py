"""Generated rows and trajectories for the tests of tracking."""

import io
import math

import pytest

from mtrl.console.console import Console
from mtrl.types import FinishReason, StopReason, Trajectory, Turn


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    """Remove the user's settings that change the output of a console."""
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def rows():
    """Rows of twelve steps with evaluations at steps 0, 6 and 12."""

    def row(step):
        success = 0.3 + 0.05 * step
        training = {
            "rollout/reward/mean": success - 0.1,
            "rollout/success/mean": success,
            "rollout/turns/mean": 3 - step / 20,
            "rollout/tokens/response_max": 90 - step,
            "analysis/zero_adv_groups": step // 3,
            "analysis/logprob_drift/max": 2.1e-05,
            "analysis/logprob_drift/mean": 3e-07,
            "perf/tokens_per_second": 4000 + 100 * step,
            "train/entropy": math.exp(-step / 10),
            "time/step": 1.25,
        }
        held_out = {
            "val/success/mean": success,
            "val/success/sampled": success - 0.1,
            "val/success/ci_low": success - 0.07,
            "val/success/ci_high": min(1.0, success + 0.06),
            "val/reward/mean": success - 0.05,
            "val/success/pass_k_1": success - 0.1,
        }
        return {"step": step, **(training if step else {}), **(held_out if step % 6 == 0 else {})}

    return [row(step) for step in range(13)]


@pytest.fixture
def turn():
    def make(text, observation="", reward=0.0, components=None, role="user"):
        seen = [{"role": role, "content": observation}] if observation else []
        message = {"role": "assistant", "content": text}
        return Turn(
            [1], [2, 3], [-0.1, -0.2], [(0, 2)], FinishReason.STOP, text, message, seen, reward, components or {}
        )

    return make


@pytest.fixture
def episode(turn):
    """Return a solved trajectory."""
    turns = [
        turn("<calc>3*4</calc>", "3 boxes of 4 marbles: how many?", 0.1, {"format": 0.1}),
        turn("<answer>12</answer>", "12", 0.9, {"correct": 0.9}, role="tool"),
    ]
    return Trajectory("task-17", "group", 0, turns, StopReason.DONE, score=1.0)


@pytest.fixture
def printed():
    """Function `printed(console => …, width=80)` that returns the output of a console without a terminal."""

    def run(act, width=80, **options):
        file = io.StringIO()
        act(Console(file, width=width, **options))
        return file.getvalue()

    return run
