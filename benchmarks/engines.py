"""Speed and memory of the local engine, vLLM and SGLang with the same policy and the same rollouts.

In every round each engine is started in a new process, as a run of `experiment=text_to_sql` starts it. One engine runs
at a time, in the opposite order in every second round. Each measured operation is first run once, untimed. Ratios are
taken within a round. An engine is ready when it has sampled its first token; its start includes the loading of the
trainer's own model. A weight update is `Engine.load_weights`; the local engine shares the trainer's weights, so that
only its version changes.

Memory is the peak while an engine starts and warms up. For vllm and sglang it is the memory of all processes of the
server, including guardians. For local it is the growth of the sampling process since before the model was loaded, which
includes the trainer's weights and the libraries that were loaded meanwhile. Pages that processes share count once.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import platform
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias, cast

import torch
from apart import run_apart
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from mtrl.command.compose import compose
from mtrl.command.program import one_sentence
from mtrl.config.model_schema import TinyConfig
from mtrl.config.schema import Config
from mtrl.engines.base import SamplingParams
from mtrl.environments.factory import load_task
from mtrl.models.tiny import make_model, save
from mtrl.rollout.rollouts import Rollouts, all_or_none, stream_seed
from mtrl.trainer.loading import load_model
from mtrl.trainer.setup.parts import RunParts, set_up, start_of
from mtrl.types import Row

ENGINES = ("local", "vllm", "sglang")
BASE = "local"
"""Engine that the other engines are compared with."""
AT_ONCE = (1, 8, 64)
"""Numbers of single turns that are sampled at the same time."""
LEAST = 8
"""Least number of single turns in a measurement."""
LOOK = 0.25
"""Seconds between two readings of the memory."""
MIB = 2**20
X_LOCAL = "x local"
EPISODES = "episodes: sampled tokens/s"
PER_SECOND = "/s"
"""End of the names of the figures that have ratios."""
Measured: TypeAlias = dict[str, float]
"""Figures of one engine in one round, by their names in the table."""


@dataclass(frozen=True)
class Sizes:
    """Size of the measurement. Each field is a command-line option."""

    rounds: int = 3
    groups: int = 16
    """Number of groups of algorithm.group_size episodes, all sampled at the same time. The default is that of a
    training step."""
    threads: int = 1
    """Number of threads of the local engine, and of a server (OMP_NUM_THREADS)."""
    tokens: int = 128
    """Number of tokens of a single turn."""


# One engine, in a process of its own


def configuration(engine: str, policy: str, folder: Path, sizes: Sizes, extra: Sequence[str]) -> Config:
    """Return the configuration of a run in which `engine` samples from `policy`."""
    ours = [f"generator={engine}", f"trainer.threads={sizes.threads}", "model=hf", f"model.path={policy}"]
    if engine != BASE:
        ours.append(f"generator.{engine}.env.OMP_NUM_THREADS='{sizes.threads}'")
    return experiment(*extra, *ours, f"run_dir={folder}")


def experiment(*overrides: str) -> Config:
    return cast(Config, OmegaConf.to_object(compose(["experiment=text_to_sql", *overrides])))


def measure(engine: str, config: Config, sizes: Sizes) -> Measured:
    """Start the engine, warm it up, measure it and close it."""
    task = load_task(config)
    before = memory([os.getpid()])
    look = (lambda: memory([os.getpid()]) - before) if engine == BASE else (lambda: memory(family(os.getpid())[1:]))
    peak, begun = Peak(look), time.perf_counter()
    parts = set_up(config, task=task)
    return asyncio.run(sample(parts, Rollouts(parts.loop, config.seed, 0.0), config, sizes, peak, begun))


async def sample(
    parts: RunParts, rollouts: Rollouts, config: Config, sizes: Sizes, peak: Peak, begun: float
) -> Measured:
    """Run every measurement twice, and return the figures of the second time. The weight update between them empties
    the engine's cache."""
    size, train = config.algorithm.group_size, parts.splits.train
    rows = [train[i % len(train)] for i in range(2 * sizes.groups)]
    try:
        await turns(parts, train[:1], 1)
        ready = time.perf_counter() - begun
        await rollouts.collect("warm-up", rows[sizes.groups :], size, parts.sampling)
        for at_once in AT_ONCE:
            await single(parts, at_once, sizes.tokens)
        await update(parts)
        held = peak.stop()

        begun = time.perf_counter()
        groups = (await rollouts.collect("measured", rows[: sizes.groups], size, parts.sampling)).groups
        seconds = time.perf_counter() - begun
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        rates = [await single(parts, at_once, sizes.tokens) for at_once in AT_ONCE]
        sampled = sum(trajectory.action_tokens for trajectory in trajectories)
        return {
            "start until ready, s": ready,
            EPISODES: sampled / seconds,
            "episodes: trajectories/s": len(trajectories) / seconds,
            **{f"single turns, {n} at once: sampled tokens/s": rate for n, rate in zip(AT_ONCE, rates, strict=True)},
            "memory, MiB": held / MIB,
            "weight update, s": await update(parts),
        }
    finally:
        await parts.engine.close()
        await parts.loop.close()


async def single(parts: RunParts, at_once: int, tokens: int) -> float:
    """Return the sampled tokens per second of single turns, `at_once` of them at the same time."""
    rows, waves = itertools.cycle(parts.splits.train), max(1, LEAST // at_once)
    begun = time.perf_counter()
    for _ in range(waves):
        await turns(parts, list(itertools.islice(rows, at_once)), tokens)
    return waves * at_once * tokens / (time.perf_counter() - begun)


async def turns(parts: RunParts, rows: Sequence[Row], tokens: int) -> None:
    """Sample a turn of exactly `tokens` tokens after each prompt; no token and no text ends it earlier."""

    async def turn(number: int, row: Row) -> None:
        name = f"single/{number}"
        prompt = parts.codec.renderer.render_ids(row["prompt"], add_generation_prompt=True)
        sampling = SamplingParams(max_generate_length=tokens, seed=stream_seed(0, name, 0))
        generation = await parts.engine.generate(name, prompt, sampling)
        parts.engine.release(name)
        if len(generation.token_ids) != tokens:
            raise SystemExit(
                f"a turn has {len(generation.token_ids)} tokens instead of {tokens} after a prompt of {len(prompt)}; "
                "lower --tokens if the context is too short for them"
            )

    for number in range(len(rows)):
        parts.engine.open(f"single/{number}")
    await all_or_none(turn(number, row) for number, row in enumerate(rows))


async def update(parts: RunParts) -> float:
    """Return the seconds of one weight update, made as in a training step."""
    weights = parts.learners.weights() if parts.sends_weights else None
    begun = time.perf_counter()
    await parts.engine.load_weights(weights, parts.engine.version + 1)
    return time.perf_counter() - begun


# Memory


class Peak:
    """Maximum of what `look` returns from now until `stop`. A thread calls it every `LOOK` seconds."""

    def __init__(self, look: Callable[[], int]):
        self._look, self._most, self._over = look, 0, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._over.set()
        self._thread.join()
        return max(self._most, self._look())

    def _run(self) -> None:
        while not self._over.wait(LOOK):
            self._most = max(self._most, self._look())


def family(pid: int) -> list[int]:
    """Return the ids of a process and of all its descendants, the process first."""
    found = [pid]
    with suppress(OSError):  # the process has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += family(int(child))
    return found


def memory(pids: Sequence[int]) -> int:
    """Return the bytes of memory of these processes, each page divided by the number of processes that share it."""
    total = 0
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


# All engines


def apart(engine: str, policy: str, sizes: Sizes, extra: Sequence[str]) -> Measured:
    """Run `measure` in a new process."""
    return run_apart(__file__, [engine, policy, asdict(sizes)], engine, extra)


def make_policy(random: Sequence[int] | None, extra: Sequence[str], folder: Path) -> str:
    """Return the folder of the policy of all engines: the tiny policy, or a random model with the same tokenizer.

    Args:
        random: hidden size and number of layers of the random model.
    """
    config = experiment(*extra, f"run_dir={folder / 'run'}")
    tiny = start_of(config, load_task(config))
    if random is None:
        return tiny
    hidden, layers = random
    recipe = TinyConfig(hidden, 3 * hidden, layers, heads=hidden // 64, init_std=0.02)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    save(make_model(recipe, tokenizer, config.seed), tokenizer, folder / "model")
    return str(folder / "model")


def compare(engines: Sequence[str], sizes: Sizes, policy: str, extra: Sequence[str], folder: Path) -> dict[str, Any]:
    """Measure all engines in all rounds, and return the results as JSON values."""
    load, begun = os.getloadavg()[0], time.perf_counter()
    # Wrong settings are reported before the first engine starts.
    configs = [configuration(engine, policy, folder / "run", sizes, extra) for engine in engines]
    found: dict[str, list[Measured]] = {engine: [] for engine in engines}
    for number in range(sizes.rounds):
        for engine in engines if number % 2 == 0 else reversed(engines):
            one = apart(engine, policy, sizes, extra)
            found[engine].append(one)
            print(f"round {number + 1}, {engine}: {one[EPISODES]:,.0f} tokens/s in episodes", flush=True)
    return {
        "sizes": asdict(sizes),
        "overrides": list(extra),
        "group_size": configs[0].algorithm.group_size,
        "parameters": sum(p.numel() for p in load_model(configs[0], policy)[0].parameters()),
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
        "load_average": [load, os.getloadavg()[0]],
        "seconds": time.perf_counter() - begun,
        "engines": {engine: summary(runs, found.get(BASE)) for engine, runs in found.items()},
    }


def summary(runs: Sequence[Measured], base: Sequence[Measured] | None) -> dict[str, Any]:
    """Return the figures of one engine in all rounds and, for figures per second, the multiples of the local engine's
    in the same round."""
    names = list(runs[0])
    compared = [name for name in names if base and base is not runs and name.endswith(PER_SECOND)]
    return {
        "values": {name: [run[name] for run in runs] for name in names},
        X_LOCAL: {n: [run[n] / other[n] for run, other in zip(runs, base or (), strict=True)] for n in compared},
    }


def table(result: dict[str, Any]) -> str:
    """Return Markdown with the medians of the rounds, and their minimum and maximum in brackets."""
    sizes, on, engines = result["sizes"], result["machine"], result["engines"]
    columns = [(engine, key) for engine, figures in engines.items() for key in ("values", X_LOCAL) if figures[key]]
    head = ["", *(engine if key == "values" else key for engine, key in columns)]
    lines = [
        f"{result['parameters'] / 1e6:.2f} M parameters; {sizes['groups']} groups of {result['group_size']} episodes; "
        f"{sizes['threads']} thread(s); medians of {sizes['rounds']} round(s), ratios within a round "
        "(minimum-maximum)",
        f"{on['cores']} cores, load average {result['load_average'][0]:.1f} to {result['load_average'][1]:.1f}; torch "
        f"{on['torch']}, Python {on['python']}; {result['seconds']:.0f} s in total",
        "",
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
    ]
    for name in engines[columns[0][0]]["values"]:
        cells = [cell(engines[engine][key].get(name, [])) for engine, key in columns]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def cell(values: Sequence[float]) -> str:
    """Return the median, and the minimum and maximum in brackets, with three digits or more."""
    if not values:
        return ""
    digits = max(0, 2 - math.floor(math.log10(max(median(values), 1e-3))))
    middle, least, most = (f"{value:,.{min(digits, 3)}f}" for value in (median(values), min(values), max(values)))
    return middle if len(values) == 1 else f"{middle} ({least}-{most})"


def parse(words: Sequence[str] | None = None) -> tuple[Sizes, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    for name, default in asdict(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help="default %(default)s")
    parser.add_argument("--random", nargs=2, type=int, metavar=("HIDDEN", "LAYERS"), help="random policy, heads of 64")
    parser.add_argument("--json", type=Path, help="also write all results to this JSON file")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    overrides_help = "overrides for all engines, e.g. generator.local.deterministic=false"
    parser.add_argument("overrides", nargs="*", help=overrides_help)
    args = parser.parse_args(words)
    sizes = Sizes(**{name: getattr(args, name) for name in asdict(Sizes())})
    if min(asdict(sizes).values()) < 1:
        parser.error("--rounds, --groups, --threads and --tokens must be at least 1")
    if args.random and (args.random[0] % 64 or min(args.random) < 1):
        parser.error("--random takes a hidden size that is a multiple of 64, and at least one layer")
    args.engines = list(dict.fromkeys(args.engines))
    return sizes, args


def main() -> None:
    sizes, args = parse()
    with one_sentence(), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.one:
            engine, policy, same = args.one
            sizes = Sizes(**same)
            config = configuration(engine, policy, folder / "run", sizes, args.overrides)
            print(json.dumps(measure(engine, config, sizes)), flush=True)
            return
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        torch.set_num_threads(1)  # make_policy trains the tiny policy if it is not cached
        policy = make_policy(args.random, args.overrides, folder)
        result = compare(args.engines, sizes, policy, args.overrides, folder)
    print(f"\n{table(result)}")
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
