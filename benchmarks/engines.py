"""Who samples faster here: the local engine, vLLM and SGLang, side by side, with one policy and one set of rollouts.

Every engine is started anew in every round, in a process of its own, as a run of `experiment=text_to_sql` starts it;
one runs at a time, and the order turns round from round to round. All that is measured was done once before, untimed.
Ratios are those within a round. Ready is who has sampled a first token, and a start has the loading of the trainer's
own model in it. A weight update is `Engine.load_weights`; the local engine shares the trainer's weights, and is only
told that they are new.

Memory is the most that an engine was seen to have while it started and warmed up. Of vllm and sglang: all processes of
the server, guardians included. Of local: by how much the process that samples has grown since before the model was
loaded; the weights are the trainer's too, and so is what the libraries loaded meanwhile. Pages that processes share
count once.
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
from mtrl.trainer.setup.loading import load_model
from mtrl.trainer.setup.parts import Parts, set_up, start_of
from mtrl.types import Row

ENGINES = ("local", "vllm", "sglang")
BASE = "local"
"""What the others are compared with."""
AT_ONCE = (1, 8, 64)
"""Turns that are asked for together, where there are no episodes."""
LEAST = 8
"""Turns that are sampled at least, however few at once."""
LOOK = 0.25
"""Seconds between two looks at the memory."""
MIB = 2**20
X_LOCAL = "x local"
EPISODES = "episodes: sampled tokens/s"
PER_SECOND = "/s"
"""Ends the names of what is compared."""
Measured: TypeAlias = dict[str, float]
"""One engine in one round, by the lines of the table."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured: one option per field."""

    rounds: int = 3
    groups: int = 16
    """Of algorithm.group_size episodes each, all at once: the default is a training step's."""
    threads: int = 1
    """Of the local engine, and of a server (OMP_NUM_THREADS)."""
    tokens: int = 128
    """Of a turn where there are no episodes."""


# One engine, in a process of its own


def configuration(engine: str, policy: str, folder: Path, sizes: Sizes, extra: Sequence[str]) -> Config:
    """Of what plays for a policy."""
    ours = [f"generator={engine}", f"trainer.threads={sizes.threads}", "model=hf", f"model.path={policy}"]
    if engine != BASE:
        ours.append(f"generator.{engine}.env.OMP_NUM_THREADS='{sizes.threads}'")
    return experiment(*extra, *ours, f"run_dir={folder}")


def experiment(*overrides: str) -> Config:
    return cast(Config, OmegaConf.to_object(compose(["experiment=text_to_sql", *overrides])))


def measure(engine: str, config: Config, sizes: Sizes) -> Measured:
    """Start it, warm it up, measure it and end it."""
    task = load_task(config)
    before = memory([os.getpid()])
    look = (lambda: memory([os.getpid()]) - before) if engine == BASE else (lambda: memory(family(os.getpid())[1:]))
    peak, begun = Peak(look), time.perf_counter()
    parts = set_up(config, task=task)
    return asyncio.run(play(parts, Rollouts(parts.loop, config.seed, 0.0), config, sizes, peak, begun))


async def play(parts: Parts, rollouts: Rollouts, config: Config, sizes: Sizes, peak: Peak, begun: float) -> Measured:
    """Everything twice; the second time counts. The update between them drops what the first time cached."""
    size, train = config.algorithm.group_size, parts.splits.train
    rows = [train[i % len(train)] for i in range(2 * sizes.groups)]
    try:
        await turns(parts, train[:1], 1)
        ready = time.perf_counter() - begun
        await rollouts.collect("warm-up", rows[sizes.groups :], size, parts.sampling)
        await single(parts, max(AT_ONCE), sizes.tokens)
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


async def single(parts: Parts, at_once: int, tokens: int) -> float:
    """Sampled tokens per second of single turns, so many at once."""
    rows, waves = itertools.cycle(parts.splits.train), max(1, LEAST // at_once)
    begun = time.perf_counter()
    for _ in range(waves):
        await turns(parts, list(itertools.islice(rows, at_once)), tokens)
    return waves * at_once * tokens / (time.perf_counter() - begun)


async def turns(parts: Parts, rows: Sequence[Row], tokens: int) -> None:
    """A turn of exactly so many tokens after each prompt: no token and no word ends it."""

    async def turn(number: int, row: Row) -> None:
        name = f"single/{number}"
        prompt = parts.codec.renderer.render_ids(row["prompt"], add_generation_prompt=True)
        sampling = SamplingParams(max_generate_length=tokens, seed=stream_seed(0, name, 0))
        generation = await parts.engine.generate(name, prompt, sampling)
        parts.engine.release(name)
        if len(generation.token_ids) != tokens:
            raise SystemExit(
                f"a turn of {len(generation.token_ids)} tokens where {tokens} were asked for after {len(prompt)}; "
                "lower --tokens if the conversation has no room for more"
            )

    for number in range(len(rows)):
        parts.engine.open(f"single/{number}")
    await all_or_none(turn(number, row) for number, row in enumerate(rows))


async def update(parts: Parts) -> float:
    """Seconds of one change of weights, as a training step makes it."""
    weights = parts.learners.weights() if parts.sends_weights else None
    begun = time.perf_counter()
    await parts.engine.load_weights(weights, parts.engine.version + 1)
    return time.perf_counter() - begun


# Memory


class Peak:
    """The most that `look` returns, in a thread, from now until `stop`."""

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
    """This process, then all below it."""
    found = [pid]
    with suppress(OSError):  # it has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += family(int(child))
    return found


def memory(pids: Sequence[int]) -> int:
    """Bytes that these processes have in memory, each page divided by the number of processes that share it."""
    total = 0
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


# All of them


def apart(engine: str, policy: str, sizes: Sizes, extra: Sequence[str]) -> Measured:
    """`measure` in a fresh process."""
    return run_apart(__file__, [engine, policy, asdict(sizes)], engine, extra)


def make_policy(random: Sequence[int] | None, extra: Sequence[str], folder: Path) -> str:
    """Folder of the policy that all engines get: the tiny one, or a random one with its tokenizer.

    Args:
        random: hidden size and layers.
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
    """Everything that is printed."""
    load, begun = os.getloadavg()[0], time.perf_counter()
    # Wrong settings are errors before the first engine starts.
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
    """All rounds of one engine and, of all that is per second, its multiples of the local engine in the same round."""
    names = list(runs[0])
    compared = [name for name in names if base and base is not runs and name.endswith(PER_SECOND)]
    return {
        "values": {name: [run[name] for run in runs] for name in names},
        X_LOCAL: {n: [run[n] / other[n] for run, other in zip(runs, base or (), strict=True)] for n in compared},
    }


def table(result: dict[str, Any]) -> str:
    """As Markdown: medians of the rounds, in brackets least to most."""
    sizes, on, engines = result["sizes"], result["machine"], result["engines"]
    columns = [(engine, key) for engine, figures in engines.items() for key in ("values", X_LOCAL) if figures[key]]
    head = ["", *(engine if key == "values" else key for engine, key in columns)]
    lines = [
        f"{result['parameters'] / 1e6:.2f} M parameters; {sizes['groups']} groups of {result['group_size']} episodes; "
        f"{sizes['threads']} thread(s); medians of {sizes['rounds']} round(s), ratios within a round (least to most)",
        f"{on['cores']} cores, load average {result['load_average'][0]:.1f} to {result['load_average'][1]:.1f}; torch "
        f"{on['torch']}, Python {on['python']}; {result['seconds']:.0f} s in all",
        "",
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
    ]
    for name in engines[columns[0][0]]["values"]:
        cells = [cell(engines[engine][key].get(name, [])) for engine, key in columns]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def cell(values: Sequence[float]) -> str:
    """The median, and in brackets the least and the most; three digits at least."""
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
    parser.add_argument("--random", nargs=2, type=int, metavar=("HIDDEN", "LAYERS"), help="a random policy; 64 a head")
    parser.add_argument("--json", type=Path, help="write everything to this file too")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="of all engines, e.g. generator.local.deterministic=false")
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
        torch.set_num_threads(1)  # the tiny policy is made now, if it is not there yet
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
