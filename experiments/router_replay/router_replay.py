"""Drift between the log-probs of engine and trainer on a small mixture of experts, with and without router replay.

    python experiments/router_replay/router_replay.py                    every arm, 16,384 sampled tokens each
    python experiments/router_replay/router_replay.py --conversations 8  fewer tokens

A Qwen3-MoE with random weights, and the same model after training on the text of `docs/`, byte by byte, sample
conversations of two turns in the embedded engine. The trainer then computes the log-probs of the sampled tokens in
packed passes, once by its own choices of experts and once by those that the engine recorded. The turns take the path of
a run: `Generation`, `Turn`, `Sample`, micro-batch.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from mtrl.engines.base import SamplingParams
from mtrl.engines.local.engine import LocalEngine
from mtrl.models.experts import chosen_experts, recorded, routers_of
from mtrl.models.preparation import prepare_packing
from mtrl.models.router_replay import RouterReplay
from mtrl.trainer.data.batching import PACKED, MicroBatch, micro_batches
from mtrl.trainer.data.samples import trajectory_samples
from mtrl.trainer.update.policy import Policy
from mtrl.types import Sample, Trajectory, Turn
from mtrl.utils.expert_ids import before_last_tokens

DOCS = Path(__file__).parents[2] / "docs"
SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "moe_intermediate_size": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 1024,
}
TURN_TOKENS = 128
OBSERVATION = list(b"\n\nAnd what follows from it? ")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
ARMS = (("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "float32"))
"""Dtypes of engine and trainer."""


def random_model() -> Any:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, initializer_range=0.1)).eval()


def trained_model(text: Tensor, steps: int) -> Any:
    """Return the random model after training on windows of 128 bytes of a text, 16 at a time."""
    model, draw = random_model(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        starts = torch.randint(len(text) - 129, (16,), generator=draw)
        windows = torch.stack([text[start : start + 129] for start in starts.tolist()])
        loss = model(input_ids=windows[:, :-1]).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(loss, windows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: {loss.item():.3f} nats per byte", flush=True)
    return model


async def conversation(engine: LocalEngine, number: int, prompt: list[int]) -> Trajectory:
    """Return a conversation of two turns."""
    turns: list[Turn] = []
    context, observation, name = list(prompt), list(prompt), f"g/{number}"
    for turn in range(2):
        found = await engine.generate(name, context, SamplingParams(TURN_TOKENS, seed=2 * number + turn))
        ids = found.token_ids
        experts = before_last_tokens(found.experts, len(observation) + len(ids))
        turns.append(Turn(observation, ids, found.logprobs, found.version_spans, found.finish, "", {}, experts=experts))
        observation = OBSERVATION
        context = context + ids + OBSERVATION
    engine.release(name)
    return Trajectory(name, "g", number, turns)


def sampled(model: Any, prompts: Sequence[list[int]]) -> list[Sample]:
    """Return the samples of a conversation after each prompt, with the engine's log-probs and experts."""
    engine = LocalEngine(model, None, max_num_seqs=64, max_context_length=1024, record_experts=True)

    async def play() -> list[Trajectory]:
        for number in range(len(prompts)):
            engine.open(f"g/{number}")
        return list(await asyncio.gather(*(conversation(engine, *pair) for pair in enumerate(prompts))))

    return [sample for t in asyncio.run(play()) for sample in trajectory_samples(t, [0.0] * len(t.turns))]


@torch.no_grad()
def gaps(policy: Policy, batches: Sequence[MicroBatch]) -> tuple[np.ndarray, float]:
    """Return trainer minus engine [N] of the log-probs, and the share of the choices of the engine, per token and
    layer, whose set of experts is not the trainer's."""
    found, different, choices = [], 0, 0
    for batch in batches:
        with policy.replaying(batch), recorded(routers_of(policy.model)) as routing:
            found.append(policy.logprobs(batch)[0] - batch.rollout_logprobs)
        own = chosen_experts(routing).unflatten(0, batch.action_mask.shape)
        mask = batch.action_mask
        one, other = own[mask].sort(-1).values, batch.experts[mask].sort(-1).values
        different += int((one != other).any(-1).sum())
        choices += one.shape[0] * one.shape[1]
    return torch.cat(found).double().numpy(), different / choices


def measured(model: Any, dtypes: tuple[str, str], prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
    """Return the figures of an arm without and with replay."""
    engine, trainer = (copy.deepcopy(model).to(DTYPES[name]) for name in dtypes)
    samples = sampled(engine, prompts)
    prepare_packing(trainer)
    batches = micro_batches(samples, [np.zeros(len(s.token_ids)) for s in samples], 4096, layout=PACKED)
    rows = []
    for replay in (None, RouterReplay(trainer)):
        gap, different = gaps(Policy(trainer, None, router_replay=replay), batches)
        rows.append(
            {
                "engine": dtypes[0],
                "trainer": dtypes[1],
                "replay": replay is not None,
                "tokens": len(gap),
                "mean": float(np.abs(gap).mean()),
                "p99": float(np.quantile(np.abs(gap), 0.99)),
                "max": float(np.abs(gap).max()),
                "k3": float((np.exp(gap) - gap - 1).mean()),
                "other_experts": different,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--steps", type=int, default=400, help="steps of training on the text")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    text = torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in sorted(DOCS.glob("*.md")))), dtype=torch.uint8)
    starts = torch.randint(len(text) - 99, (args.conversations,), generator=torch.Generator().manual_seed(2))
    prompts = [text[start : start + 40 + i % 40].tolist() for i, start in enumerate(starts.tolist())]
    rows = []
    for weights, model in (("random", random_model()), ("trained", trained_model(text.long(), args.steps))):
        for dtypes in ARMS:
            for row in measured(model, dtypes, prompts):
                rows.append({"weights": weights, **row})
                print(json.dumps(rows[-1]), flush=True)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
