"""Gaps between the log-probs of an engine and of the trainer: healthy draws, and engines with one wrong matrix.

    python experiments/canary/canary.py                  SmolLM2-135M in bfloat16, 1,000 draws of 64 tokens
    python experiments/canary/canary.py --draws 64       fewer

The embedded engine samples in bfloat16, as the servers do, and the trainer computes the log-probs of the same tokens by
packed passes. A draw is what the canary compares for one server: `TOKENS` tokens after a prompt of the task. Two rules
are counted: the mean of a draw above the tolerance, and the largest gap of its first 8 tokens above 0.3, which was the
rule before. Then the same draws are made by engines with one planted fault each.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer

from mtrl.command.compose import compose
from mtrl.engines.base import SamplingParams
from mtrl.engines.local.engine import LocalEngine
from mtrl.environments.factory import load_task
from mtrl.models.gguf import as_folder
from mtrl.models.preparation import prepare_packing
from mtrl.models.renderer import make_renderer
from mtrl.trainer.canary import TOKENS
from mtrl.trainer.data.batching import SHARED, micro_batches
from mtrl.trainer.setup.servers import HALF_TOLERANCE
from mtrl.trainer.update.policy import Policy
from mtrl.types import Sample
from mtrl.utils.files import plain

BEFORE_TOKENS, BEFORE_LIMIT = 8, 0.3
"""Former rule: number of tokens, and the largest gap among them in nats above which the run ended."""
BINS = (0.0, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


def sampled(model: Any, tokenizer: Any, prompts: list[list[int]], seed: int) -> list[Sample]:
    """Return one turn of `TOKENS` tokens or less for each prompt, with the engine's log-probs."""
    engine = LocalEngine(model, tokenizer, max_num_seqs=64, max_context_length=2048, deterministic=False)

    async def turn(number: int, prompt: list[int]) -> Sample:
        sampling = SamplingParams(max_generate_length=TOKENS, temperature=1.0, seed=seed + number)
        found = await engine.generate(f"draw/{number}", prompt, sampling)
        engine.release(f"draw/{number}")
        start, size = len(prompt), len(found.token_ids)
        mask = [False] * start + [True] * size
        return Sample(
            token_ids=[*prompt, *found.token_ids],
            loss_mask=mask,
            logprobs=[0.0] * start + list(found.logprobs),
            advantages=[0.0] * (start + size),
            versions=[0] * (start + size),
            turns=[0] * (start + size),
            group_id=str(number),
        )

    async def all_turns() -> list[Sample]:
        try:
            return list(await asyncio.gather(*(turn(number, prompt) for number, prompt in enumerate(prompts))))
        finally:
            await engine.close()

    return asyncio.run(all_turns())


def gaps(policy: Policy, samples: list[Sample]) -> list[np.ndarray]:
    """Return the absolute differences of each sample's tokens from the trainer's log-probs."""
    found: dict[int, np.ndarray] = {}
    weights = [np.zeros(len(sample.token_ids)) for sample in samples]
    for batch in micro_batches(samples, weights, 4096, layout=SHARED):
        (mine,) = policy.all_logprobs([batch])
        parts = (mine - batch.rollout_logprobs).abs().split([samples[row].action_tokens for row in batch.rows])
        found.update(zip(batch.rows, (part.numpy() for part in parts), strict=True))
    return [found[row] for row in range(len(samples))]


def merged(own: list[np.ndarray]) -> list[np.ndarray]:
    """Return draws of at least `TOKENS` tokens; turns that end early continue with the next turn, as in the canary."""
    draws, rest = [], np.empty(0)
    for gap in own:
        rest = np.concatenate([rest, gap])
        if len(rest) >= TOKENS:
            draws.append(rest)
            rest = np.empty(0)
    return draws


def verdicts(draws: list[np.ndarray]) -> dict[str, Any]:
    means = np.array([draw.mean() for draw in draws])
    before = np.array([draw[:BEFORE_TOKENS].max() for draw in draws])
    return {
        "draws": len(draws),
        "tokens": int(sum(map(len, draws))),
        "mean": float(means.mean()),
        "largest mean": float(means.max()),
        "smallest mean": float(means.min()),
        "largest gap": float(max(draw.max() for draw in draws)),
        "caught": int((~(means <= HALF_TOLERANCE)).sum()),
        "caught by the rule before": int((~(before <= BEFORE_LIMIT)).sum()),
    }


def layer(model: Any, number: int = 15) -> Any:
    return model.model.layers[number]


def swap(first: torch.Tensor, second: torch.Tensor) -> None:
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)


def noise(weight: torch.Tensor, share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight.add_(torch.randn(weight.shape, generator=generator).to(weight) * weight.float().std().to(weight) * share)


FAULTS: dict[str, Callable[[Any], Any]] = {
    "down_proj of a layer is 0": lambda m: layer(m).mlp.down_proj.weight.zero_(),
    "o_proj of a layer is transposed": lambda m: layer(m).self_attn.o_proj.weight.copy_(
        layer(m).self_attn.o_proj.weight.T.clone()
    ),
    "q_proj of a layer has its heads in another order": lambda m: layer(m).self_attn.q_proj.weight.copy_(
        layer(m).self_attn.q_proj.weight.roll(64, 0)
    ),
    "k_proj and v_proj of a layer are swapped": lambda m: swap(
        layer(m).self_attn.k_proj.weight, layer(m).self_attn.v_proj.weight
    ),
    "gate_proj and up_proj of a layer are swapped": lambda m: swap(
        layer(m).mlp.gate_proj.weight, layer(m).mlp.up_proj.weight
    ),
    "down_proj of a layer is that of the next": lambda m: layer(m).mlp.down_proj.weight.copy_(
        layer(m, 16).mlp.down_proj.weight
    ),
    "a norm of a layer is 1": lambda m: layer(m).post_attention_layernorm.weight.fill_(1.0),
    "the last norm is 1": lambda m: m.model.norm.weight.fill_(1.0),
    "up_proj of a layer is doubled": lambda m: layer(m).mlp.up_proj.weight.mul_(2.0),
    "the embedding is one row off": lambda m: m.model.embed_tokens.weight.copy_(m.model.embed_tokens.weight.roll(1, 0)),
    "a weight is NaN": lambda m: layer(m).mlp.down_proj.weight[0].fill_(float("nan")),
    "down_proj of a layer is stale by noise of half its size": lambda m: noise(layer(m).mlp.down_proj.weight, 0.5),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000, help="healthy draws (default: %(default)s)")
    parser.add_argument("--fault-draws", type=int, default=8, help="draws of each fault (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    config: Any = OmegaConf.to_object(compose(["experiment=gsm8k", "model=smollm2_135m"]))
    folder = as_folder(str(config.model.path), "model.path")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    renderer, rows = make_renderer(tokenizer, "auto"), load_task(config).splits.train
    trained = copy.deepcopy(model)
    prepare_packing(trained)
    policy = Policy(trained, tokenizer)

    def draws(engine_model: Any, count: int, seed: int) -> list[np.ndarray]:
        found: list[np.ndarray] = []
        while len(found) < count:
            wanted = min(64, 2 * (count - len(found)))
            prompts = [
                renderer.render_ids(rows[(seed + i) % len(rows)]["prompt"], add_generation_prompt=True)
                for i in range(wanted)
            ]
            found += merged(gaps(policy, sampled(copy.deepcopy(engine_model), tokenizer, prompts, seed)))
            seed += wanted
        return found[:count]

    healthy = draws(model, args.draws, 0)
    values = np.concatenate(healthy)
    counts, _ = np.histogram(values, bins=[*BINS, np.inf])
    results: dict[str, Any] = {
        "healthy": verdicts(healthy),
        "histogram": dict(zip(map(str, BINS), counts.tolist(), strict=True)),
    }
    print("healthy", results["healthy"], results["histogram"], flush=True)
    for name, plant in FAULTS.items():
        wrong = copy.deepcopy(model)
        with torch.no_grad():
            plant(wrong)
        results[name] = verdicts(draws(wrong, args.fault_draws, 10_000))
        print(name, results[name], flush=True)
    if args.out:
        args.out.write_text(json.dumps(plain(results), indent=2) + "\n")


if __name__ == "__main__":
    main()
