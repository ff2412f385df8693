"""Ten thousand episodes at once, and many steps one after the other: speed, memory, the loop's lag, and what grows.

    python benchmarks/episodes.py                   10,000 at once for each kind of environment, then 360 steps
    python benchmarks/episodes.py --only steps      the steps alone

The engine is the scripted one, which waits a moment for every turn, so that all episodes are open at the same time;
conversations, environments, time limits and bookkeeping are a run's own. The environments: one whose `step` is async,
one whose `step` is a plain function (on the pool's threads), and one with a typed tool.

Each of the many steps plays groups, pays them, makes advantages, samples and micro-batches of them, computes and writes
the metrics, lets the live diagnosis look, and writes the trajectories. Memory and live objects are read after each,
behind a collection; a line is fitted to what comes after the first third.

All on `--cores` processors, where the system can tell a process so.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mtrl.algorithms.advantages import turn_advantages
from mtrl.algorithms.reductions import token_weights
from mtrl.algorithms.signal import signal_metrics
from mtrl.config.schema import AlgorithmConfig, Config, RewardConfig
from mtrl.diagnose.live import Watch
from mtrl.engines.base import Generation, SamplingParams
from mtrl.engines.scripted import ScriptedEngine
from mtrl.environments.base import BaseEnvironment
from mtrl.environments.family import reward_is_success
from mtrl.environments.pool import EnvironmentPool
from mtrl.environments.tool_calls import format_call
from mtrl.environments.tools import ToolEnvironment, tool
from mtrl.models.renderer import make_renderer
from mtrl.models.tiny import train_tokenizer
from mtrl.record.metrics import MetricsLog
from mtrl.record.run_dir import RunDir
from mtrl.record.trajectories import write_groups
from mtrl.rewards.compose import RewardComposer
from mtrl.rollout.conversation import Codec, Conversation
from mtrl.rollout.episode import EpisodeLoop, Limits
from mtrl.rollout.rollouts import RolloutReport, Rollouts
from mtrl.trainer.data.batching import micro_batches
from mtrl.trainer.data.samples import group_samples
from mtrl.trainer.rollout_metrics import rollout_metrics
from mtrl.types import Group, Row, StopReason
from mtrl.utils.process import settled

TICK = 0.005
"""Seconds between two looks at the loop."""
SENTENCE = "the price of this item is not known here, so look for it in the list of all that is sold"
WORDS = SENTENCE.split()


@dataclass(frozen=True)
class Sizes:
    """What is measured: one command-line option per field."""

    episodes: int = 10_000
    """At once."""
    group_size: int = 8
    turns: int = 4
    words: int = 20
    """Of a turn, and of an observation."""
    delay_ms: int = 500
    """That the engine takes for a turn of the episodes at once, on average; in the many steps it takes none."""
    steps: int = 360
    step_prompts: int = 16
    repeats: int = 1
    """Of everything; the one with the least CPU time is printed."""
    diagnosis: int = 1
    """0: the many steps without the live diagnosis, which keeps all metrics of all steps, as it must."""
    cores: int = 2
    seed: int = 0


def words_of(words: int, seed: Any) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


class Plain(BaseEnvironment):
    """Says something on every turn, and pays a hash on the last."""

    def __init__(self, max_turns: int, words: int):
        super().__init__(max_turns)
        self.text = words_of(words, 0)

    def step(self, response: str, ground_truth: dict[str, Any]) -> Any:
        self.current_turn += 1
        done = self.current_turn >= self.max_turns
        return float(done and sum(response.encode()) % 2), None if done else self.text, done


class Async(Plain):
    """The same on the event loop."""

    async def step(self, response: str, ground_truth: dict[str, Any]) -> Any:  # type: ignore[override]
        return super().step(response, ground_truth)


class Tooled(ToolEnvironment):
    """The same behind a typed tool."""

    def __init__(self, max_turns: int, words: int):
        super().__init__(max_turns)
        self.text = words_of(words, 0)

    @tool
    def look(self, page: int) -> str:
        """Look at a page."""
        return self.text

    def answer(self, response: str, ground_truth: dict[str, Any]) -> tuple[float, None, bool]:
        return float(sum(response.encode()) % 2), None, True


ENVIRONMENTS: dict[str, type[BaseEnvironment]] = {"async step": Async, "plain step": Plain, "typed tool": Tooled}


class PatientEngine(ScriptedEngine):
    """Waits for every turn, between half and one and a half times the seconds, and counts how many trajectories are
    open at once."""

    def __init__(self, respond: Callable[[str, int], str], tokenizer: Any, seconds: float):
        super().__init__(respond, tokenizer)
        self.seconds, self.open_now, self.most = seconds, 0, 0

    def open(self, trajectory_id: str) -> None:
        super().open(trajectory_id)
        self.open_now += 1
        self.most = max(self.most, self.open_now)

    async def generate(self, trajectory_id: str, prompt: Any, sampling: SamplingParams) -> Generation:
        if self.seconds:
            share = zlib.crc32(f"{trajectory_id}/{self._turns[trajectory_id]}".encode()) / 2**32
            await asyncio.sleep(self.seconds * (0.5 + share))
        return await super().generate(trajectory_id, prompt, sampling)

    def release(self, trajectory_id: str) -> None:
        super().release(trajectory_id)
        self.open_now -= 1


class Player:
    """An engine, an environment, and what lets them play, as `mtrl.trainer.setup.parts` puts it together."""

    def __init__(self, sizes: Sizes, kind: str, delay: float):
        self.sizes = sizes
        message = {"role": "user", "content": " ".join([*WORDS, format_call("look", {"page": 0})])}
        tokenizer = train_tokenizer([[message] * 20], 400)
        self.codec = Codec(tokenizer, make_renderer(tokenizer))
        call = format_call("look", {"page": 0}) if kind == "typed tool" else ""
        texts = [words_of(sizes.words, n) for n in range(97)]

        def respond(trajectory_id: str, turn: int) -> str:
            text = texts[zlib.crc32(f"{trajectory_id}/{turn}".encode()) % len(texts)]
            return text if turn + 1 == sizes.turns else text + call

        self.config = Config(seed=sizes.seed, algorithm=AlgorithmConfig(group_size=sizes.group_size))
        self.engine = PatientEngine(respond, tokenizer, delay)
        self.pool = EnvironmentPool(self.config.environment.max_workers)
        environment = partial(ENVIRONMENTS[kind], sizes.turns, sizes.words)
        limits = Limits(sizes.turns, 2**20, step_timeout=600.0, episode_timeout=3600.0, retries=0)
        loop = EpisodeLoop(self.engine, environment, partial(Conversation, self.codec), self.pool, limits)
        self.rollouts = Rollouts(loop, sizes.seed, max_failed_share=0.0)
        self.sampling = SamplingParams(max_generate_length=4096, stop_token_ids=self.codec.stop_token_ids)

    async def play(self, key: str, prompts: int) -> RolloutReport:
        """So many groups at once."""
        rows: list[Row] = [
            {"id": f"{key}/{i}", "prompt": [{"role": "user", "content": words_of(20, i)}], "ground_truth": {}}
            for i in range(prompts)
        ]
        report = await self.rollouts.collect(key, rows, self.sizes.group_size, self.sampling)
        ended = [t.stop_reason for group in report.groups for t in group.trajectories]
        if set(ended) != {StopReason.DONE}:
            raise SystemExit(f"episodes ended as {sorted(set(ended))}, and all should be done")
        return report


# -- many at once ------------------------------------------------------------------------------------------------------


@dataclass
class Watcher:
    """Looks at the loop and at the memory every few milliseconds."""

    lags: list[float] = field(default_factory=list)
    """Seconds by which the loop came late."""
    most_rss: float = 0.0
    most_threads: int = 0

    async def watch(self) -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(TICK)
            self.lags.append(time.perf_counter() - start - TICK)
            self.most_rss = max(self.most_rss, rss())
            self.most_threads = max(self.most_threads, threading.active_count())


def rss() -> float:
    """MiB of this process now."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return 0.0


def at_once(sizes: Sizes, kind: str) -> dict[str, Any]:
    """All episodes of one kind of environment at once."""
    player = Player(sizes, kind, sizes.delay_ms / 1000)
    prompts = max(1, sizes.episodes // sizes.group_size)

    async def run() -> tuple[Watcher, RolloutReport, float, float]:
        await player.play("warm-up", 1)
        watcher = Watcher()
        watching = asyncio.ensure_future(watcher.watch())
        await asyncio.sleep(2 * TICK)
        wall, cpu = time.perf_counter(), time.process_time()
        report = await player.play("all", prompts)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        watching.cancel()
        return watcher, report, wall, cpu

    gc.collect()
    before = rss()
    with settled():
        watcher, report, wall, cpu = asyncio.run(run())
    player.pool.close()
    after = rss()
    episodes = sum(len(group.trajectories) for group in report.groups)
    tokens = sum(t.context_tokens for group in report.groups for t in group.trajectories)
    lags = np.array(watcher.lags) * 1000
    return {
        "episodes": episodes,
        "open_at_once": player.engine.most,
        "turns": episodes * sizes.turns,
        "tokens_per_episode": tokens / episodes,
        "wall_s": wall,
        "cpu_s": cpu,
        "episodes_per_second": episodes / wall,
        "episodes_per_cpu_second": episodes / cpu,
        "kib_per_open_episode": (watcher.most_rss - before) * 1024 / episodes,
        "kib_per_finished_episode": (after - before) * 1024 / episodes,
        "lag_ms": {
            "p50": float(np.percentile(lags, 50)),
            "p99": float(np.percentile(lags, 99)),
            "max": float(lags.max()),
        },
        "threads": watcher.most_threads,
    }


# -- one step after the other ------------------------------------------------------------------------------------------


@dataclass
class Reading:
    """After one step."""

    cpu_s: float
    rss_mib: float
    objects: int
    threads: int


class Steps:
    """What a run does in every step, without the model."""

    def __init__(self, sizes: Sizes, kind: str, folder: Path):
        self.sizes, self.player = sizes, Player(sizes, kind, 0.0)
        self.run_dir = RunDir(folder).create()
        self.composer = RewardComposer(RewardConfig())
        self.metrics = MetricsLog(self.run_dir.metrics)
        self.player.config.diagnosis.live = "warn" if sizes.diagnosis else "none"
        self.watch = Watch(self.player.config, self.run_dir)

    async def run(self) -> list[Reading]:
        readings = []
        for step in range(1, self.sizes.steps + 1):
            start = time.process_time()
            await self._step(step)
            cpu = time.process_time() - start
            gc.collect()
            readings.append(Reading(cpu, rss(), len(gc.get_objects()), threading.active_count()))
        self.metrics.close()
        self.player.pool.close()
        return readings

    async def _step(self, step: int) -> None:
        report = await self.player.play(f"step{step}", self.sizes.step_prompts)
        groups, algorithm = report.groups, self.player.config.algorithm
        for group in groups:
            await self._pay(group)
        advantages = turn_advantages(groups, algorithm, self.composer.weights)
        pairs = zip(groups, advantages, strict=True)
        samples = [sample for group, turns in pairs for sample in group_samples(group, turns)]
        micro_batches(samples, token_weights(samples, algorithm.loss_reduction, algorithm), 16_384)
        row = {**signal_metrics(groups, advantages), **rollout_metrics(report), "time/step": 1.0}
        self.metrics.log(step, row)
        self.watch.after_step({"step": step, **row})
        path = write_groups(self.run_dir.trajectories, "train", step, groups)
        for written in path.parent.iterdir():  # a disk is no part of this
            written.unlink()

    async def _pay(self, group: Group) -> None:
        await self.composer.apply_async(group)
        for trajectory in group.trajectories:
            trajectory.score = reward_is_success(trajectory, group.row)


def many_steps(sizes: Sizes, kind: str) -> dict[str, Any]:
    """So many steps, and the lines through what was read after them."""
    with tempfile.TemporaryDirectory() as folder, settled():
        readings = asyncio.run(Steps(sizes, kind, Path(folder) / "run").run())
    late = readings[len(readings) // 3 :]
    columns = {
        "rss_kib": [one.rss_mib * 1024 for one in late],
        "objects": [one.objects for one in late],
        "cpu_ms": [one.cpu_s * 1000 for one in late],
        "threads": [one.threads for one in late],
    }
    return {
        "steps": len(readings),
        "fitted": len(late),
        "episodes_per_step": sizes.step_prompts * sizes.group_size,
        "per_step": {name: line(values) for name, values in columns.items()},
        "first": {name: values[0] for name, values in columns.items()},
        "last": {name: values[-1] for name, values in columns.items()},
        "readings": [asdict(one) for one in readings],
    }


def line(values: Sequence[float]) -> dict[str, float]:
    """Slope per step of the least-squares line, its standard error, and the mean."""
    y = np.asarray(values, dtype=np.float64)
    x = np.arange(len(y)) - (len(y) - 1) / 2
    spread = (x * x).sum()
    slope = float((x * y).sum() / spread) if spread else 0.0
    rest = y - y.mean() - slope * x
    error = float(np.sqrt((rest * rest).sum() / max(1, len(y) - 2) / spread)) if spread else 0.0
    return {"slope": slope, "error": error, "mean": float(y.mean())}


# -- all of it ---------------------------------------------------------------------------------------------------------


PARTS: dict[str, Callable[[Sizes, str], dict[str, Any]]] = {"at-once": at_once, "steps": many_steps}


def measure(sizes: Sizes, kinds: Sequence[str], parts: Sequence[str]) -> dict[str, Any]:
    """Everything that is printed; every line is of a process of its own, so that none has another's memory."""
    load = [os.getloadavg()[0]]
    found = {
        part: {kind: [_apart(sizes, part, kind) for _ in range(sizes.repeats)] for kind in kinds} for part in parts
    }
    return {
        "sizes": asdict(sizes),
        **found,
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
        "load_average": [*load, os.getloadavg()[0]],
    }


def _apart(sizes: Sizes, part: str, kind: str) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).resolve()), "--only", part, "--environments", kind, "--here"]
    for name, value in asdict(sizes).items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def here(sizes: Sizes, part: str, kind: str) -> dict[str, Any]:
    """One line, in this process."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: sizes.cores])
    return PARTS[part](sizes, kind)


def table(result: dict[str, Any]) -> str:
    """As Markdown."""
    sizes, on = result["sizes"], result["machine"]
    before, after = result["load_average"]
    lines = [
        f"{sizes['turns']} turns of {sizes['words']} words, observations of as many; at once the engine takes "
        f"{sizes['delay_ms']} ms for a turn",
        f"{on['cores']} cores, {sizes['cores']} used, load average {before:.1f} to {after:.1f}; Python {on['python']}",
    ]
    if "at-once" in result:
        head = (
            "environment", "open at once", "episodes/s", "episodes per CPU s", "KiB per open episode",
            "KiB per finished one", "lag p50, ms", "p99", "max", "threads",
        )  # fmt: skip
        lines += ["", f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        for kind, several in result["at-once"].items():
            one = min(several, key=lambda each: each["cpu_s"])
            lag = one["lag_ms"]
            lines.append(
                f"| {kind} | {one['open_at_once']:,} | {one['episodes_per_second']:,.0f} "
                f"| {one['episodes_per_cpu_second']:,.0f} | {one['kib_per_open_episode']:.1f} "
                f"| {one['kib_per_finished_episode']:.1f} | {lag['p50']:.1f} | {lag['p99']:.1f} | {lag['max']:.1f} "
                f"| {one['threads']:,} |"
            )
    if "steps" in result:
        head = (
            "environment", "steps", "RSS, MiB", "RSS per step, KiB", "live objects", "objects per step",
            "CPU ms of a step", "more each step", "threads",
        )  # fmt: skip
        lines += ["", f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        for kind, several in result["steps"].items():
            least = min(several, key=lambda each: each["per_step"]["cpu_ms"]["mean"])
            fits = least["per_step"]

            def grows(name: str, digits: int, fits: dict[str, Any] = fits) -> str:
                return f"{fits[name]['slope']:+.{digits}f} ± {fits[name]['error']:.{digits}f}"

            lines.append(
                f"| {kind} | {least['steps']} | {least['last']['rss_kib'] / 1024:.0f} | {grows('rss_kib', 2)} "
                f"| {least['last']['objects']:,} | {grows('objects', 2)} | {fits['cpu_ms']['mean']:.0f} "
                f"| {grows('cpu_ms', 3)} | {least['last']['threads']} |"
            )
    return "\n".join(lines)


def parse(words: Sequence[str] | None = None) -> tuple[Sizes, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in asdict(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help="default %(default)s")
    parser.add_argument("--environments", nargs="+", choices=list(ENVIRONMENTS), default=list(ENVIRONMENTS))
    parser.add_argument("--only", choices=list(PARTS), help="one of the two parts")
    parser.add_argument("--here", action="store_true", help="the first environment in this process, as JSON")
    parser.add_argument("--json", type=Path, help="write everything to this file too")
    args = parser.parse_args(words)
    sizes = Sizes(**{name: getattr(args, name) for name in asdict(Sizes())})
    least = {"seed": 0, "delay_ms": 0, "diagnosis": 0, "group_size": 2, "steps": 6}
    for name, value in asdict(sizes).items():
        if value < least.get(name, 1):
            parser.error(f"--{name.replace('_', '-')} must be at least {least.get(name, 1)}")
    return sizes, args


def main() -> None:
    sizes, args = parse()
    parts = [args.only] if args.only else list(PARTS)
    if args.here:
        print(json.dumps(here(sizes, parts[0], args.environments[0])))
        return
    result = measure(sizes, args.environments, parts)
    print(table(result))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
