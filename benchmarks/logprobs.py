"""Peak memory and time of log-probs with a wide vocabulary, forward and backward, in the naive form and in chunks.

The model has a small body and a head of `--vocabulary` rows, and all positions are sampled tokens. Each row of the
table is measured in a process of its own. Its memory is the peak above the memory of the process after the model was
loaded and run once on a few tokens.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bounds import check_sizes

MIB = 2**20
M_MMAP_THRESHOLD = -3
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    tokens: int
    chunk: int
    """max_logits: number of logits (tokens x vocabulary) of a chunk. A chunk of all logits is the naive form."""
    vocabulary: int = 150_000
    hidden_size: int = 256
    dtype: str = "float32"
    entropy_gradient: bool = False
    repeats: int = 1
    threads: int = 1

    @property
    def logits(self) -> int:
        return self.tokens * self.vocabulary

    @property
    def naive(self) -> bool:
        return self.chunk >= self.logits


@dataclass(frozen=True)
class Found:
    """Memory and time of a case."""

    peak_mib: float
    """Peak memory above that of the model, including the gradients, in MiB."""
    gradients_mib: float
    """Memory of the gradients of the weights, in MiB. It stays in use after the pass."""
    cpu_s: float
    """Least CPU seconds of a forward and backward pass."""
    wall_s: float


def measure(case: Case) -> Found:
    """Measure forward and backward of one case in this process."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from mtrl.models.logprobs import token_logprobs

    torch.set_num_threads(case.threads)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=case.vocabulary,
        hidden_size=case.hidden_size,
        intermediate_size=case.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=min(64, case.hidden_size),
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config).to(getattr(torch, case.dtype)).eval()
    model.get_input_embeddings().requires_grad_(False)  # its gradient is as large as the head's

    def run(tokens: int, chunk: int) -> None:
        width = min(tokens, 512)
        ids = torch.randint(0, case.vocabulary, (tokens // width, width))
        logprobs, entropy = token_logprobs(
            model, torch.ones_like(ids, dtype=torch.bool), ids.flatten(), max_logits=chunk,
            entropy_gradient=case.entropy_gradient, input_ids=ids, use_cache=False,
        )  # fmt: skip
        (logprobs.sum() + entropy.sum() * case.entropy_gradient).backward()

    run(2, case.logits if case.naive else 1)  # loads everything that the measured form loads
    model.zero_grad(set_to_none=True)
    before = reset_peak()
    costs = []
    for _ in range(case.repeats):
        model.zero_grad(set_to_none=True)
        wall, cpu = time.perf_counter(), time.process_time()
        run(case.tokens, case.chunk)
        costs.append((time.process_time() - cpu, time.perf_counter() - wall))
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    cpu, wall = min(costs)
    return Found((peak() - before) / MIB, gradients / MIB, cpu, wall)


def reset_peak() -> int:
    """Reset the peak memory where the system allows it, and return the bytes that are in use now."""
    try:
        RESET.write_text("5")
    except OSError:
        return peak()
    return peak()


def peak() -> int:
    """Return the peak memory of this process in bytes."""
    try:
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        scale = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def apart(case: Case) -> Found:
    """Run `measure` in a new process. It is forked, so that only this process imports torch and Transformers."""
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    import mtrl.models.logprobs  # noqa: F401

    with ProcessPoolExecutor(1, get_context("fork"), give_memory_back) as pool:
        try:
            return pool.submit(measure, case).result()
        except BrokenProcessPool:
            raise SystemExit(f"{case}: its process was killed") from None


def give_memory_back() -> None:
    """Return freed arrays to the system immediately, so that the peak is the memory in use (mallopt(3))."""
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)


def table(cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Yield each case with its memory and time, its memory in multiples of one chunk of logits in float32, and its
    ratios to the naive form."""
    naive: dict[int, Found] = {}
    for case in cases:
        found = apart(case)
        if case.naive:
            naive[case.tokens] = found
        beside = found.peak_mib - found.gradients_mib
        row = asdict(case) | asdict(found) | {"way": "naive" if case.naive else "chunked"}
        row["chunks_of_memory"] = beside * MIB / (4 * min(case.chunk, case.logits))
        if reference := naive.get(case.tokens):
            row["memory_ratio"] = found.peak_mib / reference.peak_mib
            row["cpu_ratio"] = found.cpu_s / reference.cpu_s
        yield row


def line(row: dict[str, Any]) -> str:
    at_once = "all" if row["way"] == "naive" else str(max(1, row["chunk"] // row["vocabulary"]))
    ratios = [f"{row[key]:.2f}" if key in row else "-" for key in ("memory_ratio", "cpu_ratio")]
    cells = [
        str(row["tokens"]), row["way"], at_once, f"{row['peak_mib']:.0f}", f"{row['gradients_mib']:.0f}",
        f"{row['chunks_of_memory']:.1f}", ratios[0], f"{row['cpu_s']:.2f}", ratios[1],
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


HEADER = (
    "| tokens | form | tokens of a chunk | peak MiB | gradients, MiB | other memory, in chunks | memory / naive "
    "| CPU s | CPU s / naive |\n|---|---|---|---|---|---|---|---|---|"
)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096], help="sampled tokens")
    parser.add_argument("--chunks", type=int, nargs="+", default=[2**24, 2**26, 2**27], help="max_logits")
    parser.add_argument("--naive-up-to", type=int, default=1024, help="most tokens of the naive form")
    parser.add_argument("--entropy-gradient", action="store_true", help="also compute the gradient of the entropy")
    for name in ("vocabulary", "hidden_size", "dtype", "repeats", "threads"):
        default = getattr(Case, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--json", type=Path, help="also write all results to this file")
    options = parser.parse_args(words)
    check_sizes(parser, options, naive_up_to=0)
    return options


def main() -> None:
    options = parse()
    names = ("vocabulary", "hidden_size", "dtype", "repeats", "threads", "entropy_gradient")
    base = Case(1, 1, **{name: getattr(options, name) for name in names})
    cases = []
    for tokens in options.tokens:
        whole = replace(base, tokens=tokens, chunk=tokens * base.vocabulary)
        cases += [whole] if tokens <= options.naive_up_to else []
        cases += [replace(whole, chunk=chunk) for chunk in options.chunks if chunk < whole.logits]
    print(f"vocabulary {base.vocabulary}, hidden size {base.hidden_size}, {base.dtype}, {base.threads} thread(s)")
    print(f"{platform.machine()}, load {' '.join(f'{load:.1f}' for load in os.getloadavg())}\n\n{HEADER}", flush=True)
    rows = []
    for row in table(cases):
        rows.append(row)
        print(line(row), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
