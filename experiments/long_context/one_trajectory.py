"""Train one long trajectory on a CPU, in each way by which mtrl saves memory.

    python experiments/long_context/one_trajectory.py --tokens 65536

The trajectory has turns of 1,024 tokens, of which the policy sampled 256, and goes the way of a run: `Trajectory` to
`Sample`, micro-batch, log-probs, loss and gradient. The weights are random, and the update is not applied. Each way
runs in processes of its own, whose peak memory is measured. Its gradients are compared with those of the unsplit run:
Hugging Face's model alone, the logits of all tokens at once, and the loss by its formula, without code of mtrl.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from mtrl.command.compose import compose
from mtrl.config.overrides import quoted
from mtrl.distributed.rank_group import RankGroup
from mtrl.distributed.sharding import whole_tensor
from mtrl.distributed.world import World
from mtrl.doctor.self_test.random_model import make_tokenizer
from mtrl.models.tiny import save
from mtrl.trainer.data.batching import RowLayout
from mtrl.trainer.data.samples import Sample, trajectory_samples
from mtrl.trainer.setup.models import make_learner
from mtrl.trainer.update.learner import Learners
from mtrl.trainer.update.optimizer import Optimizer
from mtrl.trainer.update.update import Updater
from mtrl.types import FinishReason, Trajectory, Turn

VOCABULARY, LAYERS, TURN, SAMPLED = 512, 4, 1024, 256
CHUNK = 2**20
"""Maximum number of logits in memory at once, in the ways with chunks: those of 2,048 tokens."""
TOLERANCE = 1e-5
"""Largest difference of the gradients in float32, as a share of their norm."""
RECOMPUTED = "trainer.gradient_checkpointing=true"
CHUNKED = f"trainer.max_logits_per_chunk={CHUNK}"
UNSPLIT, BROKEN = "unsplit", "unsplit, with a break"


@dataclass(frozen=True)
class Way:
    """One way of computing the update."""

    ranks: int = 1
    overrides: tuple[str, ...] = ()
    is_broken: bool = False
    """Whether the trajectory has a break after three quarters of its turns: the text before it loses its last turn, so
    that two samples share the tokens before that turn."""


WAYS = {
    UNSPLIT: Way(),
    "stored": Way(),
    "half recomputed": Way(overrides=(RECOMPUTED, f"trainer.recomputed_layers={LAYERS // 2}")),
    "recomputed": Way(overrides=(RECOMPUTED,)),
    "recomputed, chunks": Way(overrides=(RECOMPUTED, CHUNKED)),
    "2 ranks": Way(2, ("trainer.sequence_parallel=2", RECOMPUTED, CHUNKED)),
    "4 ranks": Way(4, ("trainer.sequence_parallel=4", RECOMPUTED, CHUNKED)),
    BROKEN: Way(is_broken=True),
    "shared prefix": Way(1, (RECOMPUTED, CHUNKED), is_broken=True),
}


def make_model(folder: Path, tokens: int) -> None:
    """Write a small model with random weights that reads `tokens` tokens."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=tokens,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    save(Qwen3ForCausalLM(config), make_tokenizer(VOCABULARY), folder)


def make_trajectory(tokens: int, is_broken: bool = False) -> Trajectory:
    """Return a trajectory of `tokens` random tokens with an advantage for each turn, which is the turn's reward."""
    draw = random.Random(0)

    def turn() -> Turn:
        ids = [draw.randrange(VOCABULARY) for _ in range(TURN)]
        logprobs = [draw.gauss(-math.log(VOCABULARY), 0.2) for _ in range(SAMPLED)]
        spans, message = [(0, SAMPLED)], {"role": "assistant", "content": ""}
        observed, sampled = ids[:-SAMPLED], ids[-SAMPLED:]
        return Turn(observed, sampled, logprobs, spans, FinishReason.STOP, "", message, reward=draw.gauss(0, 1))

    turns = [turn() for _ in range(tokens // TURN)]
    if is_broken:
        place = len(turns) * 3 // 4
        before = [token for turn in turns[: place - 1] for token in (*turn.observation_ids, *turn.action_ids)]
        whole = [*before, *turns[place].observation_ids]
        turns[place] = replace(turns[place], observation_ids=whole, break_reason="edited")
    return Trajectory("task", "group", 0, turns)


def unsplit(folder: Path, tokens: int, is_broken: bool = False) -> tuple[float, dict[str, Tensor], int]:
    """Return the loss, its gradients by name, and the number of positions, from the model of Hugging Face alone. The
    loss is that of REINFORCE with importance weights, the mean over sampled tokens of -(p / q) A log p, without a
    gradient of p / q."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    turns = make_trajectory(tokens, is_broken).turns
    breaks = [index for index, turn in enumerate(turns) if turn.break_reason]
    total, bounds = 0.0, [0, *breaks, len(turns)]
    for start, end in pairwise(bounds):
        loss = _loss(model, turns[start:end]) / (SAMPLED * len(turns))
        loss.backward()
        total += loss.item()
    positions = sum(len(turn.observation_ids) + SAMPLED for turn in turns)
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, positions


def _loss(model: Any, turns: Sequence[Turn]) -> Tensor:
    """Return the sum of the losses of the sampled tokens of a sequence of turns."""
    ids = torch.tensor([token for turn in turns for token in (*turn.observation_ids, *turn.action_ids)])
    chosen = torch.cat(
        [torch.arange(len(turn.observation_ids) + SAMPLED) >= len(turn.observation_ids) for turn in turns]
    )
    behaviour = torch.tensor([value for turn in turns for value in turn.action_logprobs])
    advantages = torch.tensor([turn.reward for turn in turns]).repeat_interleave(SAMPLED)
    logits = model(ids[None, :-1], use_cache=False).logits[0]
    logprobs = -F.cross_entropy(logits, ids[1:], reduction="none")[chosen[1:]]
    return -((logprobs.detach() - behaviour).exp() * advantages * logprobs).sum()


class Capture(Optimizer):
    """Optimiser that stores the whole gradients instead of applying them."""

    gradients: list[Tensor]

    def step(self, step: int) -> tuple[float, float]:
        self.gradients = [whole_tensor(p.grad) if hasattr(p.grad, "placements") else p.grad for p in self.parameters]
        return 0.0, 0.0


def count_positions(samples: Sequence[Sample], layout: RowLayout, tokens: int) -> int:
    """Return the number of positions of the micro-batches, where a shared prefix counts once."""
    masks = [np.array(sample.loss_mask, dtype=bool) for sample in samples]
    plans = layout.partition([[sample] for sample in samples], tokens)
    return sum(layout.build_grid([samples[i] for i in plan], [masks[i] for i in plan]).ids.size for plan in plans)


def by_mtrl(folder: Path, tokens: int, way: Way) -> tuple[float, dict[str, Tensor], int] | None:
    """Return the loss, its gradients by name, and the number of positions, from an update of mtrl; None on ranks that
    do not lead."""
    own = ("model=hf", quoted("model.path", str(folder)), "model.device=cpu", "generator=local")
    own += (f"trainer.max_tokens_per_microbatch={tokens}", "trainer.fsdp.param_dtype=float32")
    own += ("algorithm.loss_fn=importance_sampling", "algorithm.is_cap=inf", "algorithm.loss_reduction=token_mean")
    own += ("trainer.fsdp.timeout=3600", quoted("run_dir", str(folder.parent / "run")))
    config: Any = OmegaConf.to_object(compose([*own, *way.overrides]))
    world = World.join(config.trainer.fsdp.timeout)
    with closing(world):
        learner = make_learner(config, world, str(folder))
        learner.optimizer = Capture(learner.policy.model, config.trainer.optimizer, 1)
        group = RankGroup(world, learner)
        if not world.is_leader:
            group.follow()
            return None
        try:
            learners = Learners(group, learner.flops, learner.layout, learner.ranks_per_batch)
            trajectory = make_trajectory(tokens, way.is_broken)
            samples = trajectory_samples(trajectory, trajectory.rewards)
            assert len(samples) == 1 + way.is_broken
            loss = Updater(config, learners, folder / "nonfinite.jsonl").run(samples, 0).report.loss
            positions = count_positions(samples, learner.layout, tokens)
        finally:
            group.dismiss()
        names = (name for name, _ in learner.policy.model.named_parameters())
        return loss, dict(zip(names, learner.optimizer.gradients, strict=True)), positions


def run_way(name: str, folder: Path, tokens: int) -> None:
    """Compute one way in this process, and write its figures: peak memory above that of the imported modules, seconds,
    the loss and the number of positions; the leader also writes its gradients."""
    start, imported, model = time.monotonic(), _mib("VmRSS"), folder / "model"
    way, is_reference = WAYS[name], name in (UNSPLIT, BROKEN)
    found = unsplit(model, tokens, way.is_broken) if is_reference else by_mtrl(model, tokens, way)
    figures: dict[str, float] = {"peak_mib": _mib("VmHWM") - imported, "seconds": time.monotonic() - start}
    if found is not None:
        figures["loss"], gradients, figures["positions"] = found
        save_file({key: value.contiguous() for key, value in gradients.items()}, folder / f"{name}.safetensors")
    (folder / f"{name}.{'leader' if found else time.monotonic_ns()}.json").write_text(json.dumps(figures))


def _mib(field: str) -> float:
    """Return the resident memory of this process (`VmRSS`), or its peak since the start (`VmHWM`), in MiB."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(next(line for line in status.splitlines() if line.startswith(field)).split()[1]) / 1024


def error_of(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the norm of the difference of gradients, divided by their norm."""
    assert found.keys() == expected.keys()
    differences = [(found[name].double() - value).norm() for name, value in expected.items()]
    return (torch.stack(differences).norm() / torch.stack([v.double().norm() for v in expected.values()]).norm()).item()


def reference_of(name: str) -> str:
    """Return the name of the unsplit run with the same trajectory."""
    return BROKEN if WAYS[name].is_broken else UNSPLIT


def measure(name: str, folder: Path, tokens: int) -> dict[str, float]:
    """Run one way in processes of its own, and return its figures (`run_way`), with the peak memory of the rank that
    needs most, and the error of the gradients."""
    ranks = WAYS[name].ranks
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    subprocess.run([*launcher, __file__, "--tokens", str(tokens), "--way", name, "--folder", str(folder)], check=True)
    leader = json.loads((folder / f"{name}.leader.json").read_text())
    peaks = [json.loads(path.read_text())["peak_mib"] for path in folder.glob(f"{name}.*.json")]
    gradients, expected = (load_file(folder / f"{each}.safetensors") for each in (name, reference_of(name)))
    return {**leader, "peak_mib": max(peaks), "error": error_of(gradients, expected)}


def main() -> None:
    parser = argparse.ArgumentParser(description="train one long trajectory in each way, and compare the gradients")
    parser.add_argument("--tokens", type=int, default=65536, help=f"a multiple of {TURN} (default: %(default)s)")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="*", choices=WAYS, default=[*WAYS], help="the ways to compare")
    args = parser.parse_args()
    if args.tokens < 3 * TURN or args.tokens % TURN:
        parser.error(f"--tokens {args.tokens} is no multiple of {TURN} from {3 * TURN} on")
    if args.way:
        run_way(args.way, args.folder, args.tokens)
        return
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "model", args.tokens)
        print(f"{'way':22} {'loss':>12} {'positions':>10} {'peak, MiB':>10} {'seconds':>8}  error of the gradients")
        for name in dict.fromkeys(each for way in args.only for each in (reference_of(way), way)):
            found = measure(name, Path(folder), args.tokens)
            failed |= found["error"] > TOLERANCE
            figures = f"{found['loss']:12.8f} {found['positions']:10,.0f} {found['peak_mib']:10,.0f}"
            print(f"{name:22} {figures} {found['seconds']:8.0f}  {found['error']:.1e}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
