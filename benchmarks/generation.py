"""Sampled tokens per CPU-second of the local engine, Hugging Face `generate`, vLLM, SGLang and llama.cpp, and a bound.

    python benchmarks/generation.py
    python benchmarks/generation.py --engines local hf --trajectories 64 --turns 4
    python benchmarks/generation.py --quick              tiny sizes with local and hf, to test the program

A cell is a number of concurrent trajectories with a number of turns. In each cell every engine runs in a process of its
own, one engine at a time. It samples one turn of all trajectories as a warm-up, and then whole trajectories of new
prompts until there are enough tokens. CPU seconds are those of all threads of that process, which includes the client,
and of the servers below it. All engines get the same random model and token ids. No turn ends early and no text is
parsed, so that only sampling is measured.

hf calls `generate` on all trajectories in one batch and prefills the history in each turn again, as TRL does. hf_kept
passes keys and values from turn to turn, which TRL does not do, and which works only while all contexts have the same
length. Neither computes the log-probs that the engines return. vllm and sglang are servers, which are started and
called as in a run of mtrl. llamacpp (`pip install llama-cpp-python gguf`) is called in the process of the measurement,
see `generation_llamacpp.py`.

The bound is the least time in which this machine can compute the same tokens, each of them once. For each pass it is
the longer of two times: the time of reading the weights, keys and values once, at the rate of reading an array of the
size that a step reads, and the time of multiplying, at the rate of large square matrices, or in the last column of the
model's own matrices at that number of rows. The rates are measured in every cell on one thread, with the fastest
library of PyTorch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import step
import torch
from apart import run_apart
from generation_bound import Geometry, least_seconds, measure_limits, passes, working_set
from generation_samplers import ENGINES, SERVERS, USUAL, Meter, Wave, make_sampler

from mtrl.command.program import one_sentence
from mtrl.config.derived import engine_python
from mtrl.models.tiny import save, train_tokenizer

BASE = "local"
"""Engine that the other engines are compared with."""
LIMIT = 1800.0
"""Time limit of one engine in one cell, in seconds."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measured work. Each field is a command-line option. The defaults are those of `step.py`."""

    tokens: int = 64
    """Number of sampled tokens per turn."""
    observed: int = 20
    """Number of tokens between two turns."""
    prompt: int = 20
    """Number of tokens of a prompt."""
    least: int = 4096
    """Least number of sampled tokens of a measurement."""
    rounds: int = 1
    hidden_size: int = 256
    intermediate_size: int = 768
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    vocabulary: int = 512
    dtype: str = "float32"
    threads: int = 1

    @property
    def geometry(self) -> Geometry:
        shape = (self.hidden_size, self.intermediate_size, self.layers, self.heads, self.kv_heads, self.vocabulary)
        return Geometry(*shape, itemsize=getattr(torch, self.dtype).itemsize)

    def context(self, turns: int) -> int:
        """Return the number of tokens of a whole conversation."""
        return self.prompt + turns * (self.tokens + self.observed)


QUICK = Sizes(4, 3, 5, 8, 1, hidden_size=64, intermediate_size=64, layers=2, heads=2, kv_heads=1, vocabulary=300)


@dataclass(frozen=True)
class Cell:
    trajectories: int
    turns: int

    def wave(self, number: int, sizes: Sizes) -> Wave:
        counts = sizes.tokens, sizes.prompt, sizes.observed, sizes.vocabulary
        return Wave.make(number, self.trajectories, self.turns, *counts)


# One engine in one cell, in a process of its own


def measure(engine: str, cell: Cell, sizes: Sizes, folder: Path) -> dict[str, float]:
    torch.set_num_threads(sizes.threads)
    torch.manual_seed(0)
    context = sizes.context(cell.turns)
    sampler = make_sampler(engine, folder, cell.trajectories, context, sizes.dtype, sizes.threads)

    async def sample() -> dict[str, float]:
        try:
            await sampler.sample(replace(cell, turns=1).wave(0, sizes))
            meter, sampled, number = Meter(), 0, 0
            while sampled < sizes.least:
                number += 1
                wave = cell.wave(number, sizes)
                await sampler.sample(wave)
                sampled += wave.sampled
            return {"sampled": sampled, **meter.read()}
        finally:
            await sampler.close()

    found = asyncio.run(sample())
    return found | {"tokens_per_cpu_s": found["sampled"] / found["cpu_s"]}


def apart(engine: str, cell: Cell, sizes: Sizes, folder: Path) -> dict[str, float]:
    """Run `measure` in a new process."""
    job = {"engine": engine, "cell": asdict(cell), "sizes": asdict(sizes), "folder": str(folder)}
    return run_apart(__file__, job, engine, limit=LIMIT, OMP_NUM_THREADS=str(sizes.threads))


# All engines and cells


def compare(engines: Sequence[str], cells: Sequence[Cell], sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Measure all engines in all cells, and return the results as JSON values."""
    load = os.getloadavg()[0]
    parameters = make_policy(sizes, max(cell.turns for cell in cells), folder)
    found = []
    for cell in cells:
        rounds = [one_round(engines, cell, sizes, folder, number) for number in range(sizes.rounds)]
        found.append(asdict(cell) | {"rounds": rounds})
    return {
        "sizes": asdict(sizes),
        "parameters": parameters,
        "machine": step.machine() | {"threads": sizes.threads},
        "load_average": [load, os.getloadavg()[0]],
        "engines": list(engines),
        "cells": found,
    }


def one_round(engines: Sequence[str], cell: Cell, sizes: Sizes, folder: Path, number: int) -> dict[str, Any]:
    """Measure the machine's limits, then each engine, in the opposite order in every second round."""
    of, load = sizes.geometry, os.getloadavg()[0]
    plan = list(passes(cell.trajectories, cell.turns, sizes.prompt, sizes.observed, sizes.tokens))
    limits = measure_limits(of, cell.trajectories, working_set(of, plan))
    bytes_per_s, sampled = max(limits["memory"].values()), cell.wave(0, sizes).sampled
    order = engines if number % 2 == 0 else engines[::-1]
    return {
        "limits": limits,
        "working_set": working_set(of, plan),
        "bound": {
            matrices: sampled / least_seconds(of, plan, bytes_per_s, flops_per_s)
            for matrices, flops_per_s in limits["gemm"][sizes.dtype].items()
        },
        "engines": {engine: figures_of(engine, cell, apart(engine, cell, sizes, folder)) for engine in order},
        "load_average": [load, os.getloadavg()[0]],
    }


def figures_of(engine: str, cell: Cell, found: dict[str, float]) -> dict[str, float]:
    """Print the rate of a measurement, and return its figures."""
    rate = f"{found['tokens_per_cpu_s']:,.0f} tokens per CPU-second"
    print(f"{cell.trajectories} trajectories, {cell.turns} turns, {engine}: {rate}", flush=True)
    return found


def make_policy(sizes: Sizes, turns: int, folder: Path) -> int:
    """Write a random policy with room for `turns` turns, and its tokenizer. Return its number of parameters."""
    words = [f"<w{i}>" for i in range(sizes.vocabulary - step.BASE_VOCABULARY)]
    tokenizer = train_tokenizer([], sizes.vocabulary, tuple(words))
    names = ("hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "vocabulary", "dtype")
    shape = step.Sizes(**{name: getattr(sizes, name) for name in names})
    model = step.make_policy(shape, tokenizer, sizes.context(turns))
    save(model, tokenizer, folder)
    return sum(parameter.numel() for parameter in model.parameters())


def middle(cell: dict[str, Any], engine: str) -> float:
    """Return the tokens per CPU-second of an engine, as the median of the rounds."""
    return median(found["engines"][engine]["tokens_per_cpu_s"] for found in cell["rounds"])


def ratio(cell: dict[str, Any], engine: str) -> float:
    """Return the local engine's rate divided by that of `engine` in the same round, as the median of the rounds."""
    rounds = [found["engines"] for found in cell["rounds"]]
    return median(found[BASE]["tokens_per_cpu_s"] / found[engine]["tokens_per_cpu_s"] for found in rounds)


def share(cell: dict[str, Any], engine: str, matrices: str) -> float:
    """Return the rate of `engine` divided by the bound of the same round, as the median of the rounds."""
    rounds = cell["rounds"]
    return median(found["engines"][engine]["tokens_per_cpu_s"] / found["bound"][matrices] for found in rounds)


def table(result: dict[str, Any]) -> str:
    """Return Markdown with the sampled tokens per CPU-second."""
    engines, on, sizes = result["engines"], result["machine"], result["sizes"]
    base = BASE if BASE in engines else engines[0]
    others = [engine for engine in engines if engine != base]
    against = [word for engine in others for word in (engine, *([f"{base} / {engine}"] if base == BASE else []))]
    bound = ["bound", f"{base} / bound", f"{base} / bound of own matrices"]
    lines = [
        f"{result['parameters'] / 1e6:.2f} M parameters, {sizes['dtype']}; turns of {sizes['tokens']} sampled tokens, "
        f"{sizes['observed']} observed tokens between them; sampled tokens per CPU-second, medians of "
        f"{sizes['rounds']} round(s), ratios within a round",
        f"{on['cpu']}, {on['cores']} cores, {on['threads']} used, load average {result['load_average'][0]:.1f} to "
        f"{result['load_average'][1]:.1f}; torch {on['torch']}, transformers {on['transformers']}, Python "
        f"{on['python']}",
        limits_line(result),
        "",
        f"| trajectories | turns | {' | '.join([base, *against, *bound])} |",
        "|" + "---|" * (3 + len(against) + len(bound)),
    ]
    for cell in result["cells"]:
        words = [f"{cell['trajectories']}", f"{cell['turns']}", f"{middle(cell, base):,.0f}"]
        for engine in others:
            words += [f"{middle(cell, engine):,.0f}", *([f"x {ratio(cell, engine):.2f}"] if base == BASE else [])]
        words.append(f"{median(found['bound']['square'] for found in cell['rounds']):,.0f}")
        words += [f"{share(cell, base, matrices):.0%}" for matrices in ("square", "own")]
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines)


def limits_line(result: dict[str, Any]) -> str:
    """Return the greatest rates of all rounds as text."""
    found = [a_round["limits"] for cell in result["cells"] for a_round in cell["rounds"]]
    memory = {name: max(limits["memory"][name] for limits in found) for name in ("read", "copy", "triad")}
    square = {name: max(limits["gemm"][name]["square"] for limits in found) for name in found[0]["gemm"]}
    return (
        f"memory, GB/s: {', '.join(f'{name} {rate / 1e9:.0f}' for name, rate in memory.items())}; "
        f"square matrices, GFLOP/s: {', '.join(f'{name} {rate / 1e9:.0f}' for name, rate in square.items())}"
    )


def parse(words: Sequence[str] | None = None) -> tuple[Sizes, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=ENGINES)
    parser.add_argument("--trajectories", nargs="+", type=int)
    parser.add_argument("--turns", nargs="+", type=int)
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    for name, default in asdict(Sizes()).items():
        choices = ("float32", "bfloat16") if name == "dtype" else None
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=type(default), choices=choices, help=f"default {default}"
        )
    parser.add_argument("--json", type=Path, help="also write all results to this JSON file")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    given = {name: value for name in asdict(Sizes()) if (value := getattr(args, name)) is not None}
    sizes = replace(QUICK if args.quick else Sizes(), **given)
    args.engines = args.engines or (["local", "hf"] if args.quick else list(USUAL))
    args.trajectories = args.trajectories or ([2] if args.quick else [1, 16, 64, 128])
    args.turns = args.turns or ([2] if args.quick else [1, 4, 8])
    for name, value in [*asdict(sizes).items(), *(("trajectories", n) for n in args.trajectories),
                        *(("turns", n) for n in args.turns)]:  # fmt: skip
        if name != "dtype" and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if sizes.vocabulary <= step.BASE_VOCABULARY:
        parser.error(f"--vocabulary must be at least {step.BASE_VOCABULARY + 1}")
    if sizes.heads % sizes.kv_heads or sizes.hidden_size % sizes.heads:
        parser.error("--heads must divide --hidden-size, and --kv-heads must divide --heads")
    args.engines = list(dict.fromkeys(args.engines))
    return sizes, args


def main() -> None:
    sizes, args = parse()
    with one_sentence(), tempfile.TemporaryDirectory() as folder:
        if args.one:
            one = args.one
            found = measure(one["engine"], Cell(**one["cell"]), Sizes(**one["sizes"]), Path(one["folder"]))
            print(json.dumps(found), flush=True)
            return
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        torch.set_num_threads(1)
        for engine in set(args.engines) & set(SERVERS):
            engine_python(engine, None)  # a missing engine is reported before the first one starts
        cells = [Cell(trajectories, turns) for trajectories in args.trajectories for turns in args.turns]
        result = compare(args.engines, cells, sizes, Path(folder) / "policy")
    print(f"\n{table(result)}")
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
