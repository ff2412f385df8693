"""Time of each advantage estimator in milliseconds: from the trajectories of a large step to one number per turn.

Rewards, lengths and observations are random numbers of a seed. No model is run, and torch is not imported.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from mtrl.algorithms.advantages import estimate, turn_advantages
from mtrl.algorithms.advantages.gae import token_batch, turn_batch
from mtrl.algorithms.batch import CreditBatch
from mtrl.algorithms.registry import ESTIMATORS
from mtrl.config.algorithm_schema import AlgorithmConfig
from mtrl.types import FinishReason, Group, Trajectory, Turn

WEIGHTS = {"environment": 1.0, "tidy": 0.5}
"""Weights of the reward components, for the estimator gdpo."""
ROOMS = 4
"""Number of different observations in a group, for the estimator gigpo."""

OTHERS = """\
Times of other frameworks in ms, by their own or published measurement on other machines, which allow no ratios:
[512 x 4096] / [4096 x 4096] tokens. They compute per token from a tensor of rewards; mtrl has one number per turn.
  GRPO            verl, loop over groups 41 / 127; vectorised 27 / 105
  RLOO            verl, loop over groups 35 / 162; vectorised 18 / 79
  pass@k (top-2)  verl 25 / 211
  REINFORCE++     verl, loop over tokens 457 / 3,764
  GAE             verl, loop over tokens 609 / 4,192"""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measured work. Each field is a command-line option."""

    groups: int = 512
    group_size: int = 8
    turns: int = 8
    """Number of turns of each trajectory."""
    tokens: int = 64
    """Mean number of sampled tokens per turn."""
    words: int = 40
    """Number of words per observation."""
    table_rows: int = 512
    table_columns: int = 4096
    """Number of trajectories, and of tokens per trajectory, in the further measurement of gae on a table."""
    repeats: int = 21
    seed: int = 0


def make_groups(sizes: Sizes) -> list[Group]:
    """Return groups of trajectories whose turns have rewards of 0 (half of them), 1/4 or 1."""
    rng = random.Random(sizes.seed)

    def turn(group: int) -> Turn:
        count = rng.randint(1, 2 * sizes.tokens - 1)
        reward = rng.choice((0.0, 0.0, 0.25, 1.0))
        return Turn(
            observation_ids=[1],
            action_ids=[2] * count,
            action_logprobs=[-0.5] * count,
            version_spans=[(0, count)],
            finish=FinishReason.STOP,
            text="",
            message={},
            observation=[{"role": "user", "content": " ".join([f"{group}/{rng.randrange(ROOMS)}"] * sizes.words)}],
            reward=reward,
            components={"environment": reward, "tidy": rng.random()},
        )

    def trajectory(group: int, index: int) -> Trajectory:
        return Trajectory(str(group), str(group), index, [turn(group) for _ in range(sizes.turns)])

    return [Group(str(g), {}, [trajectory(g, i) for i in range(sizes.group_size)]) for g in range(sizes.groups)]


def make_table(sizes: Sizes) -> CreditBatch:
    """Return trajectories of equal length, each with a reward at its last token and with random critic values."""
    shape = (sizes.table_rows, sizes.table_columns)
    rng = np.random.default_rng(sizes.seed)
    rewards = np.zeros(shape)
    rewards[:, -1] = rng.integers(0, 2, len(rewards))
    ones = np.ones(shape, dtype=np.int64)
    return CreditBatch(rewards, ones > 0, ones, np.arange(len(rewards)), values=rng.random(shape))


def methods(sizes: Sizes) -> dict[str, Callable[[], Any]]:
    """Return the timed function of each estimator, by name. Estimators with a critic get random critic values."""
    groups = make_groups(sizes)
    tokens = sum(trajectory.action_tokens for group in groups for trajectory in group.trajectories)
    values = np.random.default_rng(sizes.seed).random(tokens)

    def without_critic(config: AlgorithmConfig) -> Callable[[], Any]:
        return lambda: turn_advantages(groups, config, WEIGHTS)

    def with_critic(config: AlgorithmConfig, columns: Callable[..., CreditBatch]) -> Callable[[], Any]:
        return lambda: estimate(columns(CreditBatch.of(groups), values), config)

    timed = {}
    for entry in {entry.name: entry for entry in map(ESTIMATORS.find, ESTIMATORS.names())}.values():
        config = AlgorithmConfig(advantage_method=entry.name, gamma=0.95 if entry.name == "gigpo" else 1.0)
        columns = token_batch if entry.per_token else turn_batch
        timed[entry.name] = with_critic(config, columns) if entry.needs_critic else without_critic(config)
    table, gae = make_table(sizes), AlgorithmConfig(advantage_method="gae")
    timed["gae of a table"] = lambda: estimate(table, gae)
    return timed


def time_of(work: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """Return the milliseconds of each repeat, after one warm-up. CPU time is that of all threads."""
    work()
    wall, cpu = [], []
    for _ in range(repeats):
        start, busy = time.perf_counter(), time.process_time()
        work()
        cpu.append(1e3 * (time.process_time() - busy))
        wall.append(1e3 * (time.perf_counter() - start))
    return {"wall_ms": median(wall), "cpu_ms": median(cpu), "least_cpu_ms": min(cpu), "wall": wall, "cpu": cpu}


def measure(sizes: Sizes) -> dict[str, Any]:
    """Return the settings, the machine and the times of all estimators."""
    load = [os.getloadavg()[0]]
    times = {name: time_of(work, sizes.repeats) for name, work in methods(sizes).items()}
    return {
        "settings": asdict(sizes),
        "machine": machine(),
        "load_average": [*load, os.getloadavg()[0]],
        "methods": times,
    }


def machine() -> dict[str, Any]:
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS", "the default of NumPy"),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def table(result: dict[str, Any]) -> str:
    sizes, on, (before, after) = result["settings"], result["machine"], result["load_average"]
    return "\n".join(
        [
            f"{sizes['groups']} groups x {sizes['group_size']} trajectories x {sizes['turns']} turns, about "
            f"{sizes['tokens']} tokens a turn; the table of gae is [{sizes['table_rows']} x {sizes['table_columns']}]",
            f"{on['cpu']}, {on['cores']} cores, threads: {on['threads']}, load average {before:.1f} to {after:.1f}; "
            f"NumPy {on['numpy']}, Python {on['python']}",
            f"medians and minimum of {sizes['repeats']} repeats after one warm-up",
            "",
            f"{'method':<24}{'wall ms':>10}{'CPU ms':>10}{'least CPU ms':>14}",
            *(
                f"{name:<24}{one['wall_ms']:>10.1f}{one['cpu_ms']:>10.1f}{one['least_cpu_ms']:>14.1f}"
                for name, one in result["methods"].items()
            ),
            "",
            OTHERS,
        ]
    )


def parse(words: Sequence[str] | None = None) -> tuple[Sizes, Path | None]:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in asdict(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help="default %(default)s")
    parser.add_argument("--json", type=Path, help="also write all results to this JSON file")
    values = vars(parser.parse_args(words))
    path = values.pop("json")
    least = {"group_size": AlgorithmConfig().passk.k, "seed": 0}
    for name, value in values.items():
        if value < least.get(name, 1):
            parser.error(f"--{name.replace('_', '-')} must be at least {least.get(name, 1)}")
    return Sizes(**values), path


def main() -> None:
    sizes, path = parse()
    result = measure(sizes)
    print(table(result))
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
