"""Time of a decode step of the local engine in float32: all matrices by MKL, or large ones packed for oneDNN.

    python benchmarks/matrices.py                                                      3.3 million parameters
    python benchmarks/matrices.py --hidden-size 768 --intermediate-size 2304 --layers 12 --vocabulary 4096

Both ways run alternately in one process, on the same weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import median

import torch
from bounds import check_sizes
from transformers import Qwen3Config, Qwen3ForCausalLM

from mtrl.engines.local import fused

WAYS = {"MKL": 2**62, "packed": fused.LARGE}
"""Least number of elements of a packed matrix, in each way."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "layers": 4, "vocabulary": 512, "held": 150, "repeats": 30}
    for name, default in {**sizes, "threads": 1}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help="default %(default)s")
    parser.add_argument("--trajectories", type=int, nargs="+", default=[1, 4, 16, 64, 128])
    args = parser.parse_args(argv)
    check_sizes(parser, args)
    torch.set_num_threads(args.threads)
    runner = fused.FusedRunner(make_model(args))
    print(f"{sum(p.numel() for p in runner.model.parameters()) / 1e6:.2f} M parameters, {args.held} tokens held")
    print("minimum of the milliseconds of a decode step, and the median in brackets\n")
    print("| trajectories | MKL | packed | ratio | logits differ by at most |\n|---|---|---|---|---|")
    for n in args.trajectories:
        mkl, packed, difference = compare(runner, n, args.held, args.repeats)
        cells = [f"{1e3 * min(times):.2f} ({1e3 * median(times):.2f})" for times in (mkl, packed)]
        print(f"| {n} | {' | '.join(cells)} | x {min(packed) / min(mkl):.2f} | {difference:.1e} |", flush=True)


def make_model(args: argparse.Namespace) -> Qwen3ForCausalLM:
    heads = max(2, args.hidden_size // 64)
    config = Qwen3Config(
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=64,
        vocab_size=args.vocabulary,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).eval()


@torch.inference_mode()
def compare(runner: fused.FusedRunner, n: int, held: int, repeats: int) -> tuple[list[float], list[float], float]:
    """Return the seconds of each step by MKL and packed, and the largest difference of their logits."""
    runner.cache.clear()
    runner.cache.fit(n, held)
    ids, starts, lengths = torch.arange(n)[:, None] % 7, torch.full((n,), held - 1), torch.ones(n, dtype=torch.long)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    logits = {}
    for way in [*WAYS] * 3:
        fused.LARGE = WAYS[way]
        runner.forward(ids, starts, lengths, 0, held)
        for _ in range(repeats):
            start = time.perf_counter()
            logits[way] = runner.forward(ids, starts, lengths, 0, held)
            times[way].append(time.perf_counter() - start)
    return times["MKL"], times["packed"], float((logits["MKL"] - logits["packed"]).abs().max())


if __name__ == "__main__":
    main()
