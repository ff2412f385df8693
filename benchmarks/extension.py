"""Tokens and seconds of an update with merged turns (sequence extension), compared with one sample per turn.

The same rollouts are trained in both ways: merged into one sample each, as mtrl trains them, and as one sample per turn
that repeats the whole context before the turn. The benchmark checks that the gradients are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from mtrl.algorithms.losses import TokenBatch, weighted_sum
from mtrl.algorithms.reductions import token_weights
from mtrl.algorithms.registry import find_loss
from mtrl.config.algorithm_schema import AlgorithmConfig
from mtrl.config.trainer_schema import TrainerConfig
from mtrl.trainer.data.batching import micro_batches
from mtrl.trainer.data.samples import trajectory_samples
from mtrl.trainer.update.policy import Policy
from mtrl.types import FinishReason, Sample, Trajectory, Turn

TOLERANCE = 1e-4
"""Greatest difference of the two gradients, relative to their norm, that rounding in float32 explains."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measured work. Each field is a command-line option. The default numbers of tokens are a tenth of
    500, 150 and 250, so that a CPU is fast enough."""

    rollouts: int = 8
    prompt_tokens: int = 50
    tokens: int = 15
    """Number of sampled tokens per turn."""
    observation_tokens: int = 25
    """Number of context tokens between two turns."""
    hidden_size: int = 128
    intermediate_size: int = 384
    layers: int = 3
    heads: int = 2
    vocabulary: int = 512
    micro_batch_tokens: int = TrainerConfig.max_tokens_per_microbatch
    threads: int = 1
    repeats: int = 3
    """Number of updates in each way, alternately; the least CPU time counts."""
    seed: int = 0


@dataclass
class Way:
    """One of the two ways to train the same rollouts."""

    samples: list[Sample]
    gradient: Tensor | None = None
    cpu_s: float = float("inf")
    wall_s: float = float("inf")

    @property
    def tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)


def rollouts(sizes: Sizes, turns: int) -> list[Trajectory]:
    """Return trajectories of random tokens."""
    rng = random.Random(f"{sizes.seed}/{turns}")

    def turn(index: int) -> Turn:
        seen = sizes.prompt_tokens if index == 0 else sizes.observation_tokens
        ids = rng.choices(range(sizes.vocabulary), k=seen + sizes.tokens)
        return Turn(
            observation_ids=ids[:seen],
            action_ids=ids[seen:],
            action_logprobs=[rng.uniform(-7.0, -5.5) for _ in range(sizes.tokens)],
            version_spans=[(0, sizes.tokens)],
            finish=FinishReason.LENGTH,
            text="",
            message={"role": "assistant", "content": ""},
        )

    return [Trajectory("task", "group", index, [turn(i) for i in range(turns)]) for index in range(sizes.rollouts)]


def cut(trajectory: Trajectory) -> Trajectory:
    """Return the same episode as if no prompt extended the tokens before it, so that every turn starts a new sample."""
    turns, context = [], list[int]()
    for turn in trajectory.turns:
        context = context + turn.observation_ids
        turns.append(replace(turn, observation_ids=context, break_reason="template"))
        context = context + turn.action_ids
    return replace(trajectory, turns=turns)


def both(sizes: Sizes, turns: int) -> dict[str, Way]:
    """Return the samples of the same rollouts in both ways, with the same advantages."""
    trajectories = rollouts(sizes, turns)
    rng = random.Random(f"{sizes.seed}/{turns}/advantages")
    advantages = [[rng.gauss(0, 1) for _ in trajectory.turns] for trajectory in trajectories]
    ways = {"merged": trajectories, "per turn": [cut(trajectory) for trajectory in trajectories]}
    return {
        name: Way([s for t, a in zip(members, advantages, strict=True) for s in trajectory_samples(t, a)])
        for name, members in ways.items()
    }


def update(policy: Policy, samples: list[Sample], max_tokens: int) -> Tensor:
    """Make micro-batches, run forward, loss and backward, and return the gradient as one vector."""
    algorithm = AlgorithmConfig()
    loss_of = find_loss(algorithm.loss_fn)
    policy.model.zero_grad(set_to_none=True)
    weights = token_weights(samples, algorithm.loss_reduction, algorithm)
    for batch in micro_batches(samples, weights, max_tokens):
        logprobs, _ = policy.logprobs(batch)
        known = batch.rollout_logprobs
        losses, _ = loss_of(TokenBatch(logprobs, known, batch.advantages, known, batch.trajectory), algorithm)
        weighted_sum(losses, batch.weights).backward()
    return torch.cat([parameter.grad.flatten() for parameter in policy.model.parameters()])


def compare(sizes: Sizes, policy: Policy, turns: int) -> dict[str, Any]:
    """Return tokens and seconds of both ways, after one warm-up."""
    ways = both(sizes, turns)
    update(policy, ways["merged"].samples, sizes.micro_batch_tokens)
    for _ in range(sizes.repeats):
        for way in ways.values():
            wall, cpu = time.perf_counter(), time.process_time()
            way.gradient = update(policy, way.samples, sizes.micro_batch_tokens)
            way.cpu_s = min(way.cpu_s, time.process_time() - cpu)
            way.wall_s = min(way.wall_s, time.perf_counter() - wall)
    merged, apart = (ways[name] for name in ("merged", "per turn"))
    assert merged.gradient is not None and apart.gradient is not None
    difference = ((merged.gradient - apart.gradient).norm() / merged.gradient.norm()).item()
    if not difference <= TOLERANCE:
        raise SystemExit(f"with {turns} turns the gradients differ by {difference:.1e} of their norm")
    return {
        "turns": turns,
        "gradient_difference": difference,
        **{
            name: {"samples": len(way.samples), "tokens": way.tokens, "cpu_s": way.cpu_s, "wall_s": way.wall_s}
            for name, way in ways.items()
        },
        "tokens_ratio": apart.tokens / merged.tokens,
        "cpu_ratio": apart.cpu_s / merged.cpu_s,
    }


def make_policy(sizes: Sizes, context: int) -> Policy:
    """Return a Qwen3 model with random weights."""
    config = Qwen3Config(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        head_dim=sizes.hidden_size // sizes.heads,
        max_position_embeddings=context,
        tie_word_embeddings=True,
    )
    torch.manual_seed(sizes.seed)
    return Policy(Qwen3ForCausalLM(config).eval(), None)


def measure(sizes: Sizes, turns: Sequence[int]) -> dict[str, Any]:
    """Compare both ways for each number of turns, and return the results as JSON values."""
    load = [os.getloadavg()[0]]
    torch.set_num_threads(sizes.threads)
    most = sizes.prompt_tokens + max(turns) * (sizes.tokens + sizes.observation_tokens)
    policy = make_policy(sizes, most)
    found = [compare(sizes, policy, count) for count in turns]
    return {
        "settings": asdict(sizes),
        "parameters": policy.parameters,
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
        "load_average": [*load, os.getloadavg()[0]],
        "turns": found,
    }


def table(result: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    sizes, on = result["settings"], result["machine"]
    before, after = result["load_average"]
    head = (
        "turns",
        "tokens, one sample per turn",
        "tokens, merged",
        "ratio",
        "CPU s, per turn",
        "CPU s, merged",
        "ratio",
    )
    lines = [
        f"{result['parameters'] / 1e6:.2f} M parameters; {sizes['rollouts']} rollouts, prompts of "
        f"{sizes['prompt_tokens']}, {sizes['tokens']} sampled + {sizes['observation_tokens']} observed tokens per "
        f"turn, micro-batches of {sizes['micro_batch_tokens']} tokens",
        f"{on['cores']} cores, {sizes['threads']} used, load average {before:.1f} to {after:.1f}; torch {on['torch']}, "
        f"Python {on['python']}; minima of {sizes['repeats']} alternating repeats",
        "",
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
    ]
    for row in result["turns"]:
        apart, merged = row["per turn"], row["merged"]
        lines.append(
            f"| {row['turns']} | {apart['tokens']:,} | {merged['tokens']:,} | {row['tokens_ratio']:.1f} "
            f"| {apart['cpu_s']:.2f} | {merged['cpu_s']:.2f} | {row['cpu_ratio']:.1f} |"
        )
    worst = max(row["gradient_difference"] for row in result["turns"])
    return "\n".join([*lines, "", f"Gradients differ by at most {worst:.0e} of their norm."])


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw the two ratios over the number of turns."""
    import matplotlib

    from mtrl.figures.style import BLUE, ORANGE, PAPER, panels, save

    with matplotlib.rc_context(PAPER):
        figure, [[axes]] = panels(1, 1)
        turns = [row["turns"] for row in result["turns"]]
        for key, label, colour in (("tokens_ratio", "tokens", BLUE), ("cpu_ratio", "CPU seconds", ORANGE)):
            axes.plot(turns, [row[key] for row in result["turns"]], "o-", color=colour, label=label, markersize=3)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        ticks = [2**power for power in range(max(turns).bit_length())]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_yticks(ticks, [f"{tick}x" for tick in ticks])
        axes.set(xlabel="turns of a rollout", ylabel="one sample per turn / merged", xlim=(min(turns), None))
        axes.legend()
        save(figure, path, "Cost of an update with one sample per turn, as a multiple of its cost with merged turns.")


def parse(words: Sequence[str] | None = None) -> tuple[Sizes, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in asdict(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help="default %(default)s")
    parser.add_argument("--turns", type=int, nargs="+", default=[2, 4, 8, 16, 32], help="default %(default)s")
    parser.add_argument("--json", type=Path, help="also write all results to this JSON file")
    parser.add_argument("--plot", type=Path, help="draw the ratios in this .png, .svg or .pdf file")
    args = parser.parse_args(words)
    sizes = Sizes(**{name: getattr(args, name) for name in asdict(Sizes())})
    for name, value in (*asdict(sizes).items(), ("turns", min(args.turns))):
        if value < (least := 0 if name == "seed" else 1):
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    if sizes.hidden_size % (2 * sizes.heads):
        parser.error("--hidden-size must be an even multiple of --heads")
    return sizes, args


def main() -> None:
    sizes, args = parse()
    result = measure(sizes, args.turns)
    print(table(result))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if args.plot is not None:
        plot(result, args.plot)


if __name__ == "__main__":
    main()
