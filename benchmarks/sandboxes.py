"""Seconds of episodes of mini_swe and of their scores, one after another and as many at a time as there are cores.

    python benchmarks/sandboxes.py [--rows 48] [--repeats 3]

Both ways are timed alternately in one process, each time with empty caches of graded results.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

from bounds import check_sizes

from envs.mini_swe import grading, scorer
from mtrl.config.schema import Config, DataConfig, EnvironmentConfig
from mtrl.environments.factory import load_task
from mtrl.preflight.stage import Script, Stage, scripted
from mtrl.rewards.compose import RewardComposer
from mtrl.scoring.heldout import score_groups
from mtrl.types import Group
from mtrl.utils.process import usable_cores


def main() -> None:
    args = parse()
    config = Config(
        environment=EnvironmentConfig(name="mini_swe"),
        data=DataConfig(synthetic_train_rows=args.rows, synthetic_test_rows=4),
    )
    task, cores = load_task(config), usable_cores()
    family = task.family
    assert family.gold is not None
    scripts = [Script(row, scripted(family.gold(row)), "gold") for row in task.splits.train]
    stage = Stage(task.make_environment, family.score, RewardComposer(config.reward), 3, 30.0, 600.0, 600.0)
    groups = [Group(str(e.row["id"]), e.row, [e.trajectory]) for e in stage.run(scripts)]
    others = {True: replace(family, waits_for_processes=True), False: replace(family, waits_for_processes=False)}

    print(f"{platform.machine()}, {cores} cores, {args.rows} rows; medians of {args.repeats} repeats")
    report("run and score", args.repeats, lambda side: stage.run(scripts, *([cores, cores] if side else [1, 1])))
    report("score", args.repeats, lambda side: asyncio.run(score_groups(others[side], groups, 600.0)))


def report(what: str, repeats: int, work: Callable[[bool], object]) -> None:
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(repeats):
        for side_by_side, taken in seconds.items():
            for cached in (grading.run_job, scorer.replay, scorer.drive):
                cached.cache_clear()
            begun = time.perf_counter()
            work(side_by_side)
            taken.append(time.perf_counter() - begun)
    alone, together = median(seconds[False]), median(seconds[True])
    print(f"{what:>15}: one after another {alone:.2f} s, concurrently {together:.2f} s, ratio {alone / together:.2f}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=48, help="training rows, each with its reference answer")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each way")
    args = parser.parse_args()
    check_sizes(parser, args)
    return args


if __name__ == "__main__":
    main()
