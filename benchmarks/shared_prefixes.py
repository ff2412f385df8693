"""CPU time of the forward and backward passes of one step, with and without shared prefixes.

    python benchmarks/shared_prefixes.py                       a policy of 27 M parameters, random weights
    python benchmarks/shared_prefixes.py --model FOLDER        a causal LM of Transformers

The samples are random tokens in the shape of the full prompts of `search`: one system message for all, a question per
group, and three turns of a few tokens with an observation after each but the last. Both layouts compute the same
log-probs; the largest difference is printed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from bounds import check_sizes

from mtrl.models.preparation import prepare_packing
from mtrl.trainer.data.batching import PACKED, SHARED, RowLayout, micro_batches
from mtrl.trainer.update.policy import Policy
from mtrl.types import Sample


def samples_of(args: argparse.Namespace, vocabulary: int) -> list[Sample]:
    """Return the samples of one step."""
    rng = np.random.default_rng(0)

    def words(count: int) -> list[int]:
        return rng.integers(0, vocabulary, count).tolist()

    system, samples = words(args.system), []
    for group in range(args.groups):
        prompt = system + words(args.question)
        for index in range(args.group_size):
            ids, mask = list(prompt), [False] * len(prompt)
            for turn in range(args.turns):
                response = int(rng.integers(args.response // 2, args.response + 1))
                observation = args.observation if turn < args.turns - 1 else 0
                ids += words(response + observation)
                mask += [True] * response + [False] * observation
            zeros = [0.0] * len(ids)
            samples.append(Sample(ids, mask, zeros, zeros, [0] * len(ids), [0] * len(ids), f"g{group}", index))
    return samples


def update(
    model: Any, samples: Sequence[Sample], layout: RowLayout, max_tokens: int
) -> tuple[float, int, list[torch.Tensor]]:
    """Return the CPU seconds of the passes, the number of computed tokens, and the log-probs of each sample."""
    policy, found = Policy(model, None, max_logits=2**25), {}
    batches = micro_batches(samples, [np.ones(len(s.token_ids)) for s in samples], max_tokens, layout=layout)
    start = time.process_time()
    for batch in batches:
        logprobs, _ = policy.logprobs(batch)
        logprobs.sum().backward()
        parts = logprobs.detach().split([sample.action_tokens for sample in batch.samples])
        found.update(zip(batch.rows, parts, strict=True))
    seconds = time.process_time() - start
    model.zero_grad()
    return seconds, sum(batch.token_ids.numel() for batch in batches), [found[row] for row in range(len(samples))]


def load(path: str | None, dtype: torch.dtype) -> Any:
    """Return the model of a folder, or one of 27 M parameters with random weights."""
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    if path is not None:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8}
    config = Qwen3Config(**sizes, num_key_value_heads=4, head_dim=64, vocab_size=8192, tie_word_embeddings=True)
    return Qwen3ForCausalLM(config).to(dtype).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="folder of a causal LM (default: 27 M parameters, random weights)")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    add("--groups", type=int, default=4)
    add("--group-size", type=int, default=8)
    add("--system", type=int, default=350, help="tokens of the system message (default: %(default)s)")
    add("--question", type=int, default=25, help="tokens of a question (default: %(default)s)")
    add("--turns", type=int, default=3)
    add("--response", type=int, default=24, help="greatest number of tokens of a response (default: %(default)s)")
    add("--observation", type=int, default=60, help="tokens of an observation (default: %(default)s)")
    add("--max-tokens", type=int, default=4096, help="tokens of a micro-batch (default: %(default)s)")
    add("--rounds", type=int, default=2, help="rounds, of which the fastest counts (default: %(default)s)")
    add("--threads", type=int, default=1)
    args = parser.parse_args()
    check_sizes(parser, args, system=0, question=0, observation=0)
    torch.set_num_threads(args.threads)
    model = load(args.model, getattr(torch, args.dtype))
    prepare_packing(model)
    samples = samples_of(args, model.config.get_text_config().vocab_size)
    rounds = [
        {
            name: update(model, samples, layout, args.max_tokens)
            for name, layout in (("packed", PACKED), ("shared", SHARED))
        }
        for _ in range(args.rounds)
    ]
    best = {name: min(found[name][0] for found in rounds) for name in rounds[0]}
    tokens = sum(len(sample.token_ids) for sample in samples)
    print(f"{len(samples)} samples, {tokens} tokens, {args.dtype}, {args.threads} thread(s)")
    for name, seconds in best.items():
        print(
            f"{name:8} {rounds[0][name][1]:7} tokens computed   {seconds:8.2f} CPU-s   x {seconds / best['packed']:.2f}"
        )
    pairs = zip(rounds[0]["packed"][2], rounds[0]["shared"][2], strict=True)
    print(f"largest difference of a log-prob: {max(float((a - b).abs().max()) for a, b in pairs):.2g}")


if __name__ == "__main__":
    main()
