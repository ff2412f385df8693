"""Ten thousand concurrent episodes, and many training steps one after the other: speed, memory, and growth.

    python benchmarks/episodes.py                   10,000 episodes of each kind of environment, then 360 steps
    python benchmarks/episodes.py --only steps      only the steps

The scripted engine waits in every turn, so that all episodes are open at the same time. Conversations, environments,
time limits and statistics are those of a run. There is an environment whose `step` is async, one whose `step` is a
plain function (it runs on the pool's threads), and one with a typed tool. The lag is the delay of the event loop.

Each training step samples and rewards groups, computes advantages, makes samples and micro-batches, writes the metrics,
runs the live diagnosis and writes the trajectories. Memory and the number of live objects are read after each step and
a garbage collection. A line is fitted to the readings after the first third of the steps.

The benchmark runs on `--cores` cores where the system can restrict a process to them.
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
from mtrl.config.algorithm_schema import AlgorithmConfig
from mtrl.config.schema import Config, RewardConfig
from mtrl.diagnose.live import Watch
from mtrl.engines.base import SamplingParams
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
from mtrl.rollout.episode import EpisodeLimits, EpisodeLoop
from mtrl.rollout.rollouts import RolloutReport, Rollouts
from mtrl.trainer.data.batching import micro_batches
from mtrl.trainer.data.samples import group_samples
from mtrl.trainer.rollout_metrics import rollout_metrics
from mtrl.types import Generation, Group, Row, StopReason
from mtrl.utils.process import settled

TICK = 0.005
"""Seconds between two measurements of the event loop's lag."""
SENTENCE = "the price of this item is not known here, so look for it in the list of all that is sold"
WORDS = SENTENCE.split()


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measured work. Each field is a command-line option."""

    episodes: int = 10_000
    """Number of concurrent episodes."""
    group_size: int = 8
    turns: int = 4
    words: int = 20
    """Number of words of a turn, and of an observation."""
    delay_ms: int = 500
    """Mean milliseconds that the engine waits in a turn of a concurrent episode. In the training steps it does not
    wait."""
    steps: int = 360
    """Number of training steps."""
    step_prompts: int = 16
    """Number of groups of a training step."""
    repeats: int = 1
    """Number of repeats of each measurement; the one with the least CPU time is printed."""
    diagnosis: int = 1
    """0: training steps without the live diagnosis, which has to keep the metrics of all steps."""
    cores: int = 2
    seed: int = 0


def words_of(words: int, seed: Any) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


class Plain(BaseEnvironment):
    """Answers every turn with the same text; the reward of the last turn is a hash of its response."""

    def __init__(self, max_turns: int, words: int):
        super().__init__(max_turns)
        self.text = words_of(words, 0)

    def step(self, response: str, ground_truth: dict[str, Any]) -> Any:
        self.current_turn += 1
        done = self.current_turn >= self.max_turns
        return float(done and sum(response.encode()) % 2), None if done else self.text, done


class Async(Plain):
    """The same environment, whose `step` runs on the event loop."""

    async def step(self, response: str, ground_truth: dict[str, Any]) -> Any:  # type: ignore[override]
        return super().step(response, ground_truth)


class Tooled(ToolEnvironment):
    """The same environment, whose text comes from a typed tool."""

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
    """Waits in every turn for 0.5 to 1.5 times `seconds`, and counts the trajectories that are open together."""

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


class Bench:
    """An engine, an environment and their rollouts, assembled as in `mtrl.trainer.setup.parts`."""

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
        limits = EpisodeLimits(sizes.turns, 2**20, step_timeout=600.0, episode_timeout=3600.0, retries=0)
        loop = EpisodeLoop(self.engine, environment, partial(Conversation, self.codec), self.pool, limits)
        self.rollouts = Rollouts(loop, sizes.seed, max_failed_share=0.0)
        self.sampling = SamplingParams(max_generate_length=4096, stop_token_ids=self.codec.stop_token_ids)

    async def collect(self, key: str, prompts: int) -> RolloutReport:
        """Sample `prompts` groups at the same time."""
        rows: list[Row] = [
            {"id": f"{key}/{i}", "prompt": [{"role": "user", "content": words_of(20, i)}], "ground_truth": {}}
            for i in range(prompts)
        ]
        report = await self.rollouts.collect(key, rows, self.sizes.group_size, self.sampling)
        ended = [t.stop_reason for group in report.groups for t in group.trajectories]
        if set(ended) != {StopReason.DONE}:
            raise SystemExit(f"episodes ended as {sorted(set(ended))} instead of done")
        return report


# -- concurrent episodes -----------------------------------------------------------------------------------------------


@dataclass
class Watcher:
    """Measures the event loop's lag, memory and threads every few milliseconds."""

    lags: list[float] = field(default_factory=list)
    """Seconds by which the event loop was late, one per measurement."""
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
    """Return the resident memory of this process in MiB."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return 0.0


def at_once(sizes: Sizes, kind: str) -> dict[str, Any]:
    """Measure concurrent episodes of one kind of environment."""
    bench = Bench(sizes, kind, sizes.delay_ms / 1000)
    prompts = max(1, sizes.episodes // sizes.group_size)

    async def run() -> tuple[Watcher, RolloutReport, float, float]:
        await bench.collect("warm-up", 1)
        watcher = Watcher()
        watching = asyncio.ensure_future(watcher.watch())
        await asyncio.sleep(2 * TICK)
        wall, cpu = time.perf_counter(), time.process_time()
        report = await bench.collect("all", prompts)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        watching.cancel()
        return watcher, report, wall, cpu

    gc.collect()
    before = rss()
    with settled():
        watcher, report, wall, cpu = asyncio.run(run())
    bench.pool.close()
    after = rss()
    episodes = sum(len(group.trajectories) for group in report.groups)
    tokens = sum(t.context_tokens for group in report.groups for t in group.trajectories)
    lags = np.array(watcher.lags) * 1000
    return {
        "episodes": episodes,
        "open_at_once": bench.engine.most,
        "turns": episodes * sizes.turns,
        "tokens_per_episode": tokens / episodes,
        "wall_s": wall,
        "cpu_s": cpu,
        "episodes_per_second": episodes / wall,
        "episodes_per_cpu_second": episodes / cpu,
        "kib_per_open_episode": (watcher.most_rss - before) * 1024 / bench.engine.most,
        "kib_per_finished_episode": (after - before) * 1024 / episodes,
        "lag_ms": {
            "p50": float(np.percentile(lags, 50)),
            "p99": float(np.percentile(lags, 99)),
            "max": float(lags.max()),
        },
        "threads": watcher.most_threads,
    }


# -- training steps ----------------------------------------------------------------------------------------------------


@dataclass
class Reading:
    """What is read after one training step."""

    cpu_s: float
    rss_mib: float
    objects: int
    threads: int


class Steps:
    """The work of a run in each training step, without the model."""

    def __init__(self, sizes: Sizes, kind: str, folder: Path):
        self.sizes, self.bench = sizes, Bench(sizes, kind, 0.0)
        self.run_dir = RunDir(folder).create()
        self.composer = RewardComposer(RewardConfig())
        self.metrics = MetricsLog(self.run_dir.metrics)
        self.bench.config.diagnosis.live = "warn" if sizes.diagnosis else "none"
        self.watch = Watch(self.bench.config, self.run_dir)

    async def run(self) -> list[Reading]:
        readings = []
        for step in range(1, self.sizes.steps + 1):
            start = time.process_time()
            await self._step(step)
            cpu = time.process_time() - start
            gc.collect()
            readings.append(Reading(cpu, rss(), len(gc.get_objects()), threading.active_count()))
        self.metrics.close()
        self.bench.pool.close()
        return readings

    async def _step(self, step: int) -> None:
        report = await self.bench.collect(f"step{step}", self.sizes.step_prompts)
        groups, algorithm = report.groups, self.bench.config.algorithm
        for group in groups:
            await self._reward(group)
        advantages = turn_advantages(groups, algorithm, self.composer.weights)
        pairs = zip(groups, advantages, strict=True)
        samples = [sample for group, turns in pairs for sample in group_samples(group, turns)]
        micro_batches(samples, token_weights(samples, algorithm.loss_reduction, algorithm), 16_384)
        row = {**signal_metrics(groups, advantages), **rollout_metrics(report), "time/step": 1.0}
        self.metrics.log(step, row)
        self.watch.after_step({"step": step, **row})
        path = write_groups(self.run_dir.trajectories, "train", step, groups)
        for written in path.parent.iterdir():  # the space on the disk is not measured
            written.unlink()

    async def _reward(self, group: Group) -> None:
        await self.composer.apply_async(group)
        for trajectory in group.trajectories:
            trajectory.score = reward_is_success(trajectory, group.row)


def many_steps(sizes: Sizes, kind: str) -> dict[str, Any]:
    """Run the training steps, and fit lines to the readings after them."""
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
    """Return the slope per step of the least-squares line, its standard error, and the mean of the values."""
    y = np.asarray(values, dtype=np.float64)
    x = np.arange(len(y)) - (len(y) - 1) / 2
    spread = (x * x).sum()
    slope = float((x * y).sum() / spread) if spread else 0.0
    rest = y - y.mean() - slope * x
    error = float(np.sqrt((rest * rest).sum() / max(1, len(y) - 2) / spread)) if spread else 0.0
    return {"slope": slope, "error": error, "mean": float(y.mean())}


# -- all measurements --------------------------------------------------------------------------------------------------


PARTS: dict[str, Callable[[Sizes, str], dict[str, Any]]] = {"at-once": at_once, "steps": many_steps}


def measure(sizes: Sizes, kinds: Sequence[str], parts: Sequence[str]) -> dict[str, Any]:
    """Run each measurement in a process of its own, so that none includes the memory of another."""
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
    """Run one measurement in this process."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: sizes.cores])
    return PARTS[part](sizes, kind)


def table(result: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    sizes, on = result["sizes"], result["machine"]
    before, after = result["load_average"]
    lines = [
        f"{sizes['turns']} turns of {sizes['words']} words, observations of as many words; the engine waits "
        f"{sizes['delay_ms']} ms in a turn of a concurrent episode",
        f"{on['cores']} cores, {sizes['cores']} used, load average {before:.1f} to {after:.1f}; Python {on['python']}",
    ]
    if "at-once" in result:
        head = (
            "environment", "open at once", "episodes/s", "episodes per CPU s", "KiB per open episode",
            "KiB per finished episode", "lag p50, ms", "p99", "max", "threads",
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
            "CPU ms of a step", "CPU ms per step", "threads",
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
    parser.add_argument("--only", choices=list(PARTS), help="run one of the two parts")
    parser.add_argument("--here", action="store_true", help="measure the first environment in this process, print JSON")
    parser.add_argument("--json", type=Path, help="also write all results to this JSON file")
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
