"""Training steps per minute of overlapping runs, compared with runs in which sampling and updates alternate.

The same tiny policy is trained on the word problems of `envs/gsm8k`, once with tools that take 50 to 500 ms and once
with tools that answer immediately. In each round the ways run one after the other, in the opposite order in every
second round. Only ratios within a round are compared, since other work on the machine changes from minute to minute.
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
"""Least and greatest time of a step of the slow environment, in seconds."""
SYNCHRONOUS, ANY_ORDER = "synchronous", "synchronous, turns in any order"
WAYS = {
    SYNCHRONOUS: (),
    ANY_ORDER: ("generator.local.deterministic=false",),
    "overlapped": ("async_config.max_steps_off_policy=1",),
    "overlapped, two steps": ("async_config.max_steps_off_policy=2",),
}
"""Overrides of each compared way; all other settings are the defaults. The default engine lets turns wait for each
other, so that a resumed run repeats the numbers of the first run. With slow tools this waiting takes long, and the gain
from avoiding it is not a gain of overlap, so the second way avoids it without overlap."""
BASES = {SYNCHRONOUS: "x synchronous", ANY_ORDER: "x any order"}
"""Ways that the other ways are compared with, and the headings of these ratios."""
TOOLS = {"50 to 500 ms": "environment.name=slow_gsm8k", "none": "environment.name=gsm8k"}
"""Override of the environment for each latency of its steps."""
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
"""Overrides for a run that only trains and has no last step. The policy learns nothing, so that each step takes the
same work."""


class SlowGsm8k(Gsm8kEnv):
    """Word problems whose steps each take 50 to 500 ms. The time depends on the row and on all responses so far."""

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
    """Size of the measurement. Each field is a command-line option."""

    rounds: int = 3
    warm_up: int = 2
    """Number of steps before the measured ones. An overlapping run samples its first two batches at the same time."""
    steps: int = 5
    """Number of measured steps."""


@dataclass(frozen=True)
class Measured:
    """Figures of the measured steps of one run."""

    steps_per_minute: float
    sampled_per_second: float
    """Number of sampled tokens per second of the whole steps."""
    trainer_waits: float
    """Share of the time in which the trainer waited for rollouts."""
    nothing_sampled: float
    """Share of the time in which no turn was sampled."""
    side_by_side: float
    """Share of the time in which generator and trainer both worked."""
    update_seconds: float
    """Mean time of an update in seconds. An update may take longer while rollouts run."""
    staleness: float
    """Mean age of the trained tokens, in training steps."""
    oldest: float
    """Greatest age of a trained token, in training steps."""
    seconds: float
    """Seconds of all measured steps."""


def configuration(policy: str, folder: Path, *overrides: str) -> DictConfig:
    """Return the configuration of one run."""
    model = ("experiment=gsm8k", "model=hf", f"model.path={policy}")
    return compose([*model, *QUIET, *overrides, f"run_dir={folder}"])


def run(cfg: DictConfig, sizes: Sizes) -> Measured:
    """Train the warm-up steps and the measured steps, and return the figures of the measured steps."""
    config: Config = OmegaConf.to_object(cfg)
    folder = RunDir(config.run_dir).create()
    folder.write_config(cfg)
    trainer = Trainer(config, set_up(config), folder, Console(io.StringIO()))
    asyncio.run(train(trainer, sizes.warm_up + sizes.steps))
    trainer.metrics.close()
    return read(folder, sizes)


async def train(trainer: Trainer, steps: int) -> None:
    """Train `steps` steps, and cancel the run while it works on the next steps.

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
    """Return the figures of a run from its files: from the end of the last warm-up step to that of the last step."""
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
    """Run all ways with all tools in all rounds, and return the results as JSON values."""
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
    """Return the runs of one way, their medians, and their speed as multiples of each base in the same round."""
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
    """Return the results as Markdown."""
    sizes, on = result["sizes"], result["machine"]
    before, after = result["load_average"]
    bases = [base for base in BASES if all(base in ways for ways in result["tools"].values())]
    head = (
        "tools", "way", "steps/min", *(BASES[base] for base in bases), "trainer waits", "nothing sampled",
        "side by side", "update, s", "sampled tokens/s", "staleness, mean", "max",
    )  # fmt: skip
    lines = [
        f"{result['prompts']} prompts x {result['group_size']} rollouts; {sizes['steps']} measured steps after "
        f"{sizes['warm_up']} warm-up steps, {sizes['rounds']} rounds; medians of the rounds, ratios within a round "
        "(minimum to maximum)",
        f"{on['cores']} cores, load average {before:.1f} to {after:.1f}; torch {on['torch']}, Python {on['python']}; "
        f"{result['seconds']:.0f} s in total",
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
    """Return the minimum and the maximum as text."""
    return f"{min(values):.2f} to {max(values):.2f}"


def parse(words: Sequence[str] | None = None) -> tuple[Sizes, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in asdict(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help="default %(default)s")
    parser.add_argument(
        "--ways", nargs="+", choices=list(WAYS), default=list(WAYS)[:3], help="default: all but the last"
    )
    parser.add_argument("--tools", nargs="+", choices=list(TOOLS), default=list(TOOLS), help="latencies of a step")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to test the program")
    parser.add_argument("--runs", type=Path, help="keep the folders of the runs here, for mtrl figures")
    parser.add_argument("--json", type=Path, help="also write all results to this JSON file")
    parser.add_argument("overrides", nargs="*", help="overrides of all runs, e.g. trainer.prompts_per_step=8")
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
