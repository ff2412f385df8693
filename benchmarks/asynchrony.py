"""Steps per minute with rollouts and updates side by side, against a run in which they take turns.

The same tiny policy is trained on the word problems of `envs/gsm8k`, once with tools that take their time and once
with tools that answer at once. The ways are run in rounds, one after the other, and the order turns round from round
to round; only ratios within a round are compared, since other work on the machine changes from minute to minute.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import io
import json
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from envs.gsm8k import FAMILY
from envs.gsm8k.environment import Gsm8kEnv
from mtrl.command.compose import compose
from mtrl.config.schema import Config
from mtrl.console.console import Console
from mtrl.environments.base import StepResult
from mtrl.environments.factory import load_task
from mtrl.environments.family import register
from mtrl.figures.spans import overlap, read_spans, windows
from mtrl.record.run_dir import RunDir
from mtrl.trainer.loop import Trainer
from mtrl.trainer.setup.parts import set_up, start_of
from mtrl.types import Message, Row

LATENCY = (0.05, 0.5)
"""Seconds that a step of the slow environment takes at least and at most."""
SYNCHRONOUS, ANY_ORDER = "synchronous", "synchronous, turns in any order"
WAYS = {
    SYNCHRONOUS: (),
    ANY_ORDER: ("generator.local.deterministic=false",),
    "overlapped": ("async_config.max_steps_off_policy=1",),
    "overlapped, two steps": ("async_config.max_steps_off_policy=2",),
}
"""What is compared, as overrides; all else is the default. The default engine lets turns wait for each other, so that a
resumed run repeats the numbers of the first; slow tools make that dear, which is no merit of whatever overlaps."""
BASES = {SYNCHRONOUS: "x synchronous", ANY_ORDER: "x any order"}
"""What the others are compared with."""
TOOLS = {"50 to 500 ms": "environment.name=slow_gsm8k", "none": "environment.name=gsm8k"}
"""The environments, by the latency of their steps."""
QUIET = (
    "evaluation.every_steps=0",
    "evaluation.before_train=false",
    "trainer.checkpoint.every_steps=0",
    "trainer.save_trajectories_every=0",
    "trainer.max_steps=1000000",
    "trainer.optimizer.lr=1e-9",
    "preflight.at_start=none",
    "diagnosis.live=none",
)
"""Nothing but training steps, without an end; and nothing is learnt, so that the last one is as much work as the first.
"""


class SlowGsm8k(Gsm8kEnv):
    """Word problems whose every step takes 50 to 500 ms: how long depends on the row and on all responses."""

    def reset(self, row: Row | None = None) -> list[Message] | None:
        self.digest = hashlib.blake2b(str(row and row["id"]).encode(), digest_size=8)
        return super().reset(row)

    async def step(self, response: str, ground_truth: dict[str, Any]) -> StepResult:  # type: ignore[override]
        self.digest.update(response.encode())
        share = int.from_bytes(self.digest.digest(), "little") / 2**64
        await asyncio.sleep(LATENCY[0] + share * (LATENCY[1] - LATENCY[0]))
        return super().step(response, ground_truth)


register(replace(FAMILY, name="slow_gsm8k", environment=SlowGsm8k))


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    rounds: int = 3
    warm_up: int = 2
    """Steps before the measured ones: the first two batches of an overlapping run are sampled at once."""
    steps: int = 5


@dataclass(frozen=True)
class Measured:
    """The measured steps of one run."""

    steps_per_minute: float
    sampled_per_second: float
    """Number of sampled tokens per time of whole steps."""
    trainer_waits: float
    """Share of the time in which the trainer waited for rollouts."""
    nothing_sampled: float
    """Share of the time in which no turn was sampled."""
    side_by_side: float
    """Share of the time in which generator and trainer both did something."""
    update_seconds: float
    """Of a step; beside rollouts an update may take longer."""
    staleness: float
    """Mean over tokens, in training steps."""
    oldest: float
    seconds: float


def configuration(policy: str, folder: Path, *overrides: str) -> DictConfig:
    """Of one run."""
    model = ("experiment=gsm8k", "model=hf", f"model.path={policy}")
    return compose([*model, *QUIET, *overrides, f"run_dir={folder}"])


def run(cfg: DictConfig, sizes: Sizes) -> Measured:
    """Train so many steps."""
    config: Config = OmegaConf.to_object(cfg)
    folder = RunDir(config.run_dir).create()
    folder.write_config(cfg)
    trainer = Trainer(config, set_up(config), folder, Console(io.StringIO()))
    asyncio.run(train(trainer, sizes.warm_up + sizes.steps))
    trainer.metrics.close()
    return read(folder, sizes)


async def train(trainer: Trainer, steps: int) -> None:
    """Stop in the middle of things after `steps`, while the next ones are on their way.

    Raises:
        KeyboardInterrupt: a signal asked to stop.
    """
    training = asyncio.ensure_future(trainer.run())

    def stop() -> None:
        if trainer.progress.step >= steps:
            training.cancel()

    trainer.on_row = stop
    with suppress(asyncio.CancelledError):
        await training
        raise KeyboardInterrupt


def read(folder: RunDir, sizes: Sizes) -> Measured:
    """From the record of a run: from the end of the last step of the warm-up to the end of the last one measured."""
    lines = [json.loads(line) for line in folder.timeline.read_text().splitlines()]
    ends = {line["step"]: line["end"] for line in lines if line["name"] == "sync"}
    start, end = ends[sizes.warm_up], ends[sizes.warm_up + sizes.steps]
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    rows = [row for row in rows if sizes.warm_up < row["step"] <= sizes.warm_up + sizes.steps]
    spans = [replace(s, start=max(s.start, start), end=min(s.end, end)) for s in read_spans(lines)]

    def mean(key: str) -> float:
        return fmean(row[key] for row in rows)

    return Measured(
        steps_per_minute=60 * sizes.steps / (end - start),
        sampled_per_second=sum(row["perf/tokens_per_second"] * row["time/step"] for row in rows) / (end - start),
        trainer_waits=mean("perf/idle_frac"),
        nothing_sampled=mean("perf/rollout_idle_frac"),
        side_by_side=overlap(windows([span for span in spans if span.end > span.start])),
        update_seconds=mean("time/update"),
        staleness=mean("analysis/staleness/mean"),
        oldest=max(row["analysis/staleness/max"] for row in rows),
        seconds=end - start,
    )


def measure(
    sizes: Sizes, ways: Sequence[str], tools: Sequence[str], extra: Sequence[str], runs: Path
) -> dict[str, Any]:
    """Everything that is printed."""
    load, begun = [os.getloadavg()[0]], time.perf_counter()
    start: Config = OmegaConf.to_object(compose(["experiment=gsm8k", *extra]))
    policy = start_of(start, load_task(start))
    found: dict[str, dict[str, list[Measured]]] = {tool: {way: [] for way in ways} for tool in tools}
    for number in range(sizes.rounds):
        for tool in tools:
            for way in ways if number % 2 == 0 else reversed(ways):
                folder = runs / f"{tool}, {way}, {number}".replace(", ", "-").replace(" ", "_")
                one = run(configuration(policy, folder, *extra, TOOLS[tool], *WAYS[way]), sizes)
                found[tool][way].append(one)
                print(f"tools: {tool}; {way}, round {number + 1}: {one.steps_per_minute:.1f} steps/min", flush=True)
    return {
        "sizes": asdict(sizes),
        "overrides": list(extra),
        "prompts": start.trainer.prompts_per_step,
        "group_size": start.algorithm.group_size,
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
        "load_average": [*load, os.getloadavg()[0]],
        "seconds": time.perf_counter() - begun,
        "tools": {tool: {way: summary(way, by_way) for way in ways} for tool, by_way in found.items()},
    }


def summary(way: str, found: dict[str, list[Measured]]) -> dict[str, Any]:
    """Its runs, their medians, and its speed as a multiple of the others' in the same round."""
    runs = found[way]
    ratios = {
        base: [one.steps_per_minute / other.steps_per_minute for one, other in zip(runs, found[base], strict=True)]
        for base in BASES
        if base in found
    }
    medians = {name: median(getattr(run, name) for run in runs) for name in asdict(runs[0])}
    return {
        "ratio": {base: median(several) for base, several in ratios.items()},
        "ratios": ratios,
        "median": medians,
        "runs": [asdict(run) for run in runs],
    }


def table(result: dict[str, Any]) -> str:
    """As Markdown."""
    sizes, on = result["sizes"], result["machine"]
    before, after = result["load_average"]
    bases = [base for base in BASES if all(base in ways for ways in result["tools"].values())]
    head = (
        "tools", "way", "steps/min", *(BASES[base] for base in bases), "trainer waits", "nothing sampled",
        "side by side", "update, s", "sampled tokens/s", "staleness, mean", "max",
    )  # fmt: skip
    lines = [
        f"{result['prompts']} prompts x {result['group_size']} rollouts; {sizes['steps']} steps after "
        f"{sizes['warm_up']}, {sizes['rounds']} rounds; medians of the rounds, ratios within a round (least to most)",
        f"{on['cores']} cores, load average {before:.1f} to {after:.1f}; torch {on['torch']}, Python {on['python']}; "
        f"{result['seconds']:.0f} s in all",
        "",
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
    ]
    for tool, ways in result["tools"].items():
        for way, figures in ways.items():
            one = figures["median"]
            lines.append(
                f"| {tool} | {way} | {one['steps_per_minute']:.1f} "
                + "".join(f"| {figures['ratio'][base]:.2f} ({spread(figures['ratios'][base])}) " for base in bases)
                + f"| {one['trainer_waits']:.0%} | {one['nothing_sampled']:.0%} | {one['side_by_side']:.0%} "
                f"| {one['update_seconds']:.2f} | {one['sampled_per_second']:,.0f} "
                f"| {one['staleness']:.2f} | {one['oldest']:.0f} |"
            )
    return "\n".join(lines)


def spread(values: Sequence[float]) -> str:
    """From the least to the most."""
    return f"{min(values):.2f} to {max(values):.2f}"


def parse(words: Sequence[str] | None = None) -> tuple[Sizes, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in asdict(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help="default %(default)s")
    parser.add_argument(
        "--ways", nargs="+", choices=list(WAYS), default=list(WAYS)[:3], help="by default all but the last"
    )
    parser.add_argument("--tools", nargs="+", choices=list(TOOLS), default=list(TOOLS), help="latency of a step")
    parser.add_argument("--quick", action="store_true", help="sizes at which only the program is tried out")
    parser.add_argument("--runs", type=Path, help="keep the folders of the runs here, for python -m mtrl.figures")
    parser.add_argument("--json", type=Path, help="write everything to this file too")
    parser.add_argument("overrides", nargs="*", help="of all runs, e.g. trainer.prompts_per_step=8")
    args = parser.parse_args(words)
    sizes = Sizes(args.rounds, args.warm_up, args.steps)
    for name, value in asdict(sizes).items():
        if value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    args.ways = list(dict.fromkeys(args.ways))
    if args.quick:
        sizes = Sizes(rounds=1, warm_up=1, steps=1)
        args.overrides = ["debug=fast", *args.overrides]
    return sizes, args


def main() -> None:
    sizes, args = parse()
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(sizes, args.ways, args.tools, args.overrides, args.runs or Path(scratch))
    print(f"\n{table(result)}")
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
