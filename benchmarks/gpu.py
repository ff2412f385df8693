"""Rates of sampling and of updates on one GPU: Hugging Face `generate`, the local engine, and variants of the update.

    python benchmarks/gpu.py                        the shapes of Qwen3-0.6B with random weights
    python benchmarks/gpu.py --model FOLDER         another causal LM
    python benchmarks/gpu.py --quick                tiny sizes; runs on a CPU too, without torch.compile

Sampling: one turn of 256 tokens after a prompt of 256, for 64 trajectories at once, by Hugging Face `generate` (which
returns no log-probs), and by the local engine with and without CUDA graphs. Each samples once as a warm-up.

Updates: 64 samples of 512 tokens on average in groups of 8 with a shared prompt, in packs of at most 16,384 tokens, in
bfloat16 with float32 weights; the last variant has one pack of all samples. FLOPs are those of the model, without
recomputation (`mtrl/trainer/flops.py`); the share is that of the peak in the data sheet. The first update of each
variant is not timed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from mtrl.distributed.world import World
from mtrl.doctor.self_test.bench import GPU, QUICK, Bench
from mtrl.doctor.self_test.random_model import build
from mtrl.doctor.self_test.rollouts import sampled
from mtrl.doctor.self_test.workload import free_memory, make_samples, new_learner, timed_updates, vocabulary
from mtrl.trainer.setup.engine import training_engine

ENGINES = {"local, graphs": "generator.local.cuda_graphs=true", "local, eager": "generator.local.cuda_graphs=false"}
STORED = "trainer.gradient_checkpointing=false"
COMPILED = "trainer.compile=true"
CHUNKS = "trainer.max_logits_per_chunk"
UPDATES = {
    "default": (),
    "compiled": (COMPILED,),
    "no recomputation": (STORED,),
    "no recomputation, compiled": (STORED, COMPILED),
    "no recomputation, compiled, 2^29 logits": (STORED, COMPILED, f"{CHUNKS}={2**29}"),
    "no recomputation, compiled, 2^30 logits": (STORED, COMPILED, f"{CHUNKS}={2**30}"),
    "the same, 32,768 tokens": (STORED, COMPILED, f"{CHUNKS}={2**30}", "trainer.max_tokens_per_microbatch=32768"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a causal LM; default: random weights")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--json", type=Path, help="also write the rates to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        gpus = torch.cuda.device_count()
        bench = Bench(args.model or f"{folder}/model", QUICK if args.quick else GPU, gpus, folder)
        if args.model is None:
            build(bench)
        print(f"{torch.cuda.get_device_name() if gpus else 'CPU'}, torch {torch.__version__}", flush=True)
        figures = {"sampling": dict(sampling(bench)), "updates": dict(updates(bench))}
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def sampling(bench: Bench) -> Iterator[tuple[str, float]]:
    """Yield the tokens per second of each engine, and print them beside those of `generate`."""
    base = generate_rate(bench)
    print(f"\n{'sampling':42} {'tokens/s':>10} {'x generate':>11}\n{'generate':42} {base:10,.0f} {1:11.2f}", flush=True)
    yield "generate", base
    for name, override in ENGINES.items():
        rate = asyncio.run(engine_rate(bench, override))
        print(f"{name:42} {rate:10,.0f} {rate / base:11.2f}", flush=True)
        yield name, rate
        free_memory()


def generate_rate(bench: Bench) -> float:
    device, sizes = torch.device("cuda" if bench.on_gpu else "cpu"), bench.sizes
    dtype = torch.bfloat16 if bench.on_gpu else torch.float32
    model = AutoModelForCausalLM.from_pretrained(bench.model, dtype=dtype).to(device).eval()
    ids = torch.randint(model.config.vocab_size, (sizes.trajectories, sizes.turn_tokens), device=device)
    settings: dict[str, Any] = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "pad_token_id": 0}
    settings |= {"max_new_tokens": sizes.turn_tokens, "min_new_tokens": sizes.turn_tokens}

    def run() -> float:
        start = time.perf_counter()
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
        return time.perf_counter() - start

    run()
    return ids.numel() / run()


async def engine_rate(bench: Bench, override: str) -> float:
    config = bench.config(*([bench.half] if bench.on_gpu else []), override)
    learner = new_learner(bench, config)
    engine = training_engine(config, World(), bench.model, learner.policy, bench.sizes.context)
    try:
        await sampled(bench, learner, engine)
        start = time.perf_counter()
        turns = await sampled(bench, learner, engine)
        return sum(len(turn.token_ids) - bench.sizes.turn_tokens for turn in turns) / (time.perf_counter() - start)
    finally:
        await engine.close()


def updates(bench: Bench) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the figures of each variant of the update, and print them."""
    print(f"\n{'update':42} {'tokens/s':>10} {'TFLOP/s':>8} {'of peak':>8} {'GiB':>6}", flush=True)
    for name, overrides in UPDATES.items():
        if COMPILED in overrides and not bench.on_gpu:
            continue  # minutes of compilation
        config = bench.config(bench.half, *overrides)
        learner = new_learner(bench, config)
        rate = timed_updates(bench, config, learner, make_samples(bench, vocabulary(learner)))
        peak = f"{rate.tflops_per_second:8.3g} {rate.peak_share:8.1%} {rate.peak_bytes / 2**30:6.1f}"
        print(f"{name:42} {rate.tokens_per_second:10,.0f} {peak}", flush=True)
        yield name, asdict(rate)
        del learner
        free_memory()


if __name__ == "__main__":
    main()
