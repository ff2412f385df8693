"""Tokens per second of mtrl's update with samples of mixed lengths, compared with a bare loop over the same model.

The bare loop runs forward and backward over the same tokens with the cross-entropy of every position, without padding,
metrics or an optimiser: once with one sample at a time, and once with rows of equal length. The faster one is the
bound. mtrl's side is the whole update of a training step: micro-batches, log-probs and entropies of the sampled tokens,
the loss, metrics, clipping and the optimiser.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bounds import check_sizes
from step import BASE_VOCABULARY, Sizes, machine, make_policy, peak_rss
from torch.nn.functional import cross_entropy

from mtrl.config.schema import Config
from mtrl.config.trainer_schema import FsdpConfig, TrainerConfig
from mtrl.distributed.world import World
from mtrl.models.preparation import prepare_packing
from mtrl.models.tiny import train_tokenizer
from mtrl.trainer.data.batching import PACKED, PADDED, micro_batches
from mtrl.trainer.setup.models import prepared
from mtrl.trainer.update.learner import Learner, alone
from mtrl.trainer.update.optimizer import Optimizer
from mtrl.trainer.update.policy import Policy
from mtrl.trainer.update.update import Updater
from mtrl.types import Sample


@dataclass(frozen=True)
class Shape:
    """Sizes of the measured update. Each field is a command-line option."""

    samples: int = 64
    mean_tokens: int = 250
    spread: float = 0.6
    """Standard deviation of the logarithm of the length of a sample."""
    turns: int = 4
    """Number of turns per sample. A quarter of each turn is context, and the other tokens are trained."""
    micro_batch_tokens: int = 2048
    dtype: str = "float32"
    """Data type of forward and backward. The weights are float32."""
    hidden_size: int = Sizes.hidden_size
    layers: int = Sizes.layers
    rounds: int = 5
    threads: int = 1
    seed: int = 0


def make_samples(shape: Shape) -> list[Sample]:
    """Return samples of several turns with lognormal lengths of at most four times the mean."""
    draw = random.Random(shape.seed)
    longest, shortest = 4 * shape.mean_tokens, 4 * shape.turns
    samples = []
    for number in range(shape.samples):
        drawn = draw.lognormvariate(0.0, shape.spread) * shape.mean_tokens * 2.718281828 ** (-(shape.spread**2) / 2)
        length = int(min(max(drawn, shortest), longest))
        ids = [draw.randrange(BASE_VOCABULARY) for _ in range(length)]
        turn = -(-length // shape.turns)
        mask = [position % turn >= -(-turn // 4) for position in range(length)]
        samples.append(
            Sample(
                group_id=str(number // 8),
                trajectory=number % 8,
                token_ids=ids,
                loss_mask=mask,
                logprobs=[-6.0 if chosen else 0.0 for chosen in mask],
                advantages=[1.0 if number % 2 else -1.0] * length,
                versions=[0] * length,
                turns=[position // turn for position in range(length)],
            )
        )
    return samples


class Ours:
    """mtrl's update with one layout of its micro-batches."""

    def __init__(self, shape: Shape, model: Any, tokenizer: Any, packing: bool):
        fsdp = FsdpConfig(param_dtype=None if shape.dtype == "float32" else shape.dtype)
        trainer = TrainerConfig(max_tokens_per_microbatch=shape.micro_batch_tokens, packing=packing, fsdp=fsdp)
        self.config = Config(seed=shape.seed, trainer=trainer)
        self.layout = PACKED if packing else PADDED
        model = copy.deepcopy(model)
        if packing:
            prepare_packing(model)
        policy = Policy(prepared(model, self.config, World()), tokenizer)
        optimizer = Optimizer(policy.model, trainer.optimizer, 1000)
        learners = alone(Learner(self.config, policy, None, optimizer))
        self.updater = Updater(self.config, learners, Path("nonfinite_batch.jsonl"))

    def __call__(self, samples: list[Sample]) -> None:
        self.updater.run(samples, 0)

    def filled(self, samples: list[Sample]) -> float:
        """Return the share of the computed tokens that are not padding."""
        weights = [[1.0] * len(sample.token_ids) for sample in samples]
        batches = micro_batches(samples, weights, self.config.trainer.max_tokens_per_microbatch, layout=self.layout)
        return sum(len(sample.token_ids) for sample in samples) / sum(batch.token_ids.numel() for batch in batches)


class Bare:
    """Forward and backward over rows without padding."""

    def __init__(self, shape: Shape, model: Any, rows: Callable[[Shape, list[Sample]], list[torch.Tensor]]):
        self.shape, self.rows = shape, rows
        self.model = copy.deepcopy(model).to(getattr(torch, shape.dtype))

    def __call__(self, samples: list[Sample]) -> None:
        for ids in self.rows(self.shape, samples):
            logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits.flatten(0, 1)
            cross_entropy(logits.float(), ids[:, 1:].flatten(), reduction="sum").backward()
        self.model.zero_grad(set_to_none=True)


def one_by_one(shape: Shape, samples: list[Sample]) -> list[torch.Tensor]:
    return [torch.tensor([sample.token_ids]) for sample in samples]


def equal_rows(shape: Shape, samples: list[Sample]) -> list[torch.Tensor]:
    """Return the tokens of all samples in rows of the mean length."""
    ids = torch.tensor([token for sample in samples for token in sample.token_ids])
    width = len(ids) // len(samples)
    return list(ids[: width * len(samples)].view(-1, width).split(max(1, shape.micro_batch_tokens // width)))


def measure(shape: Shape) -> dict[str, Any]:
    """Measure all ways in every round, and return their CPU seconds and their rates as shares of the round's bound."""
    load = [os.getloadavg()[0]]
    torch.set_num_threads(shape.threads)
    sizes = Sizes(hidden_size=shape.hidden_size, layers=shape.layers)
    words = tuple(f"<w{i}>" for i in range(sizes.vocabulary - BASE_VOCABULARY))
    tokenizer = train_tokenizer([], sizes.vocabulary, words)
    model = make_policy(sizes, tokenizer, 4 * shape.mean_tokens)
    samples = make_samples(shape)
    ways: dict[str, Any] = {
        "bare, one by one": Bare(shape, model, one_by_one),
        "bare, equal rows": Bare(shape, model, equal_rows),
        "mtrl, padded": Ours(shape, model, tokenizer, False),
        "mtrl, packed": Ours(shape, model, tokenizer, True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(shape.rounds + 1):
        for name, way in ways.items():
            start = time.process_time()
            way(samples)
            if number:
                seconds[name].append(time.process_time() - start)
    tokens = sum(len(sample.token_ids) for sample in samples)
    bare = [min(times) for times in zip(*(seconds[name] for name in ways if name.startswith("bare")), strict=True)]
    return {
        "settings": asdict(shape),
        "machine": machine(),
        "load_average": [*load, os.getloadavg()[0]],
        "tokens": tokens,
        "trained": sum(sum(sample.loss_mask) for sample in samples),
        "peak_rss_mib": peak_rss(),
        "ways": {
            name: {
                "cpu_s": times,
                "tokens_per_cpu_s": tokens / median(times),
                "share_of_bare": median(b / mine for b, mine in zip(bare, times, strict=True)),
                "filled": ways[name].filled(samples) if isinstance(ways[name], Ours) else 1.0,
            }
            for name, times in seconds.items()
        },
    }


def table(result: dict[str, Any]) -> str:
    on, settings = result["machine"], result["settings"]
    before, after = result["load_average"]
    return "\n".join(
        [
            f"{settings['samples']} samples, {result['tokens']:,} tokens, {result['trained']:,} of them trained; "
            f"computed in {settings['dtype']}, micro-batches of {settings['micro_batch_tokens']} tokens",
            f"{on['cpu']}, {on['cores']} cores, {on['threads']} used, load average {before:.1f} to {after:.1f}; "
            f"torch {on['torch']}; medians of {settings['rounds']} rounds; peak RSS {result['peak_rss_mib']:,.0f} MiB",
            "",
            f"{'way':<20}{'tokens per CPU-s':>18}{'share of bare':>16}{'not padding':>14}",
            *(
                f"{name:<20}{way['tokens_per_cpu_s']:>18,.0f}{way['share_of_bare']:>16.1%}{way['filled']:>14.1%}"
                for name, way in result["ways"].items()
            ),
        ]
    )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in asdict(Shape()).items():
        choices = ("float32", "bfloat16") if name == "dtype" else None
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, choices=choices)
    parser.add_argument("--json", type=Path, help="also write all results to this JSON file")
    args = parser.parse_args(words)
    check_sizes(parser, args, spread=0, seed=0)
    values = vars(args)
    path = values.pop("json")
    result = measure(Shape(**values))
    print(table(result))
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
