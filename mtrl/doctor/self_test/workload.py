"""The work of a self-test: samples with random tokens, the learner of a training run, and timed updates."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mtrl.config.schema import Config
from mtrl.distributed.world import World
from mtrl.doctor.architecture import find
from mtrl.doctor.memory import Memory
from mtrl.doctor.self_test.bench import Bench
from mtrl.doctor.self_test.products import peak_rate
from mtrl.errors import UserError
from mtrl.trainer.data.batching import MicroBatch, RowLayout, micro_batches
from mtrl.trainer.loading import compute_dtype
from mtrl.trainer.setup.models import make_learner
from mtrl.trainer.throughput import Computation
from mtrl.trainer.update.learner import Learner, Learners, alone
from mtrl.trainer.update.update import Updater, UpdateResult, per_sample
from mtrl.types import Sample

GIB = 2**30
GROUP = 8
"""Number of samples with the same prompt."""
PROCESS_PARTS = ("process", "slack")
"""Parts of the memory plan that PyTorch's allocator does not count."""


def new_learner(bench: Bench, config: Config) -> Learner:
    """Return the learner of a single process."""
    return make_learner(config, World(), bench.model)


def vocabulary(learner: Learner) -> int:
    return learner.policy.model.config.get_text_config().vocab_size


def make_samples(bench: Bench, vocabulary: int) -> list[Sample]:
    """Return samples with random tokens in groups of eight, each with one prompt, and with lengths between half of the
    mean and one and a half times the mean."""
    draw, sizes = random.Random(0), bench.sizes
    prompt: list[int] = []
    samples = []
    for number in range(sizes.samples):
        if number % GROUP == 0:
            prompt = [draw.randrange(vocabulary) for _ in range(sizes.sample_tokens // 4)]
        length = round(sizes.sample_tokens * (0.5 + number / max(1, sizes.samples - 1)))
        mask = [position >= len(prompt) for position in range(length)]
        samples.append(
            Sample(
                group_id=str(number // GROUP),
                trajectory=number % GROUP,
                token_ids=prompt + [draw.randrange(vocabulary) for _ in range(length - len(prompt))],
                loss_mask=mask,
                logprobs=[-math.log(vocabulary) * chosen for chosen in mask],
                advantages=[(1.0 if number % 2 else -1.0) * chosen for chosen in mask],
                versions=[0 if chosen else -1 for chosen in mask],
                turns=[0 if chosen else -1 for chosen in mask],
            )
        )
    return samples


def update(bench: Bench, config: Config, learners: Learners, samples: list[Sample], step: int) -> UpdateResult:
    """Make one optimiser step.

    Raises:
        UserError: the loss or the gradient is not finite.
    """
    return Updater(config, learners, Path(bench.scratch) / "nonfinite.jsonl").run(samples, step)


def batches_of(bench: Bench, samples: Sequence[Sample], layout: RowLayout) -> list[MicroBatch]:
    """Return the micro-batches of samples, with equal weights."""
    import numpy as np

    weights = [np.full(len(sample.token_ids), 1.0 / len(samples)) for sample in samples]
    return micro_batches(samples, weights, bench.sizes.micro_batch_tokens, layout=layout)


def logprobs_of(bench: Bench, learners: Learners, samples: Sequence[Sample], layout: RowLayout) -> Tensor:
    """Return the trainer's log-probs of all sampled tokens, in the order of the samples."""
    batches = batches_of(bench, samples, layout)
    found = learners.logprobs(batches)
    pairs = [pair for batch, logprobs in zip(batches, found, strict=True) for pair in per_sample(batch, logprobs)]
    by_sample = {id(sample): logprobs for sample, logprobs in pairs}
    return torch.cat([by_sample[id(sample)] for sample in samples]).float()


@dataclass(frozen=True)
class UpdateRate:
    """The speed and the memory of an update."""

    tokens_per_second: float
    tflops_per_second: float
    peak_share: float
    """Share of the peak rate of the device, from the table or measured."""
    peak_bytes: int
    """Peak of the allocated GPU memory; 0 on a CPU."""
    held_bytes: int
    """GPU memory that the trainer holds after an update, without cached blocks; 0 on a CPU."""
    planned_bytes: int
    """The same peak by the memory plan; 0 if the plan has no formula for the architecture, or on a CPU."""

    def line(self) -> str:
        """Return the figures in a few words."""
        text = f"{self.tokens_per_second:,.0f} tokens/s, {self.tflops_per_second:.3g} TFLOP/s, "
        return text + f"{self.peak_share:.0%} of the peak{memory_text(self.peak_bytes, self.planned_bytes)}"


def timed_updates(bench: Bench, config: Config, learner: Learner, samples: list[Sample]) -> UpdateRate:
    """Make an update that is not timed, since kernels are loaded in it, and then timed ones."""
    learners = alone(learner)
    update(bench, config, learners, samples, 0)
    if bench.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    finish(bench)
    start, seconds, works, step = time.perf_counter(), 0.0, Computation(), 1
    while seconds < bench.sizes.seconds and step < 20:
        works = sum(update(bench, config, learners, samples, step).works, works)
        finish(bench)
        step += 1
        seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() if bench.on_gpu else 0
    rate = works.flops / seconds
    return UpdateRate(
        tokens_per_second=works.tokens / seconds,
        tflops_per_second=rate / 1e12,
        peak_share=rate / peak_rate(learner.policy.device, compute_dtype(config)),
        peak_bytes=peak,
        held_bytes=torch.cuda.memory_allocated() if bench.on_gpu else 0,
        planned_bytes=planned(bench, config),
    )


def memory_text(peak: int, planned: int) -> str:
    """Return the peak GPU memory beside the planned one, as the end of a line; empty on a CPU."""
    plan = f"plan {planned / GIB:.1f}" if planned else "no plan"
    return f", {peak / GIB:.1f} GiB ({plan})" if peak else ""


def planned(bench: Bench, config: Config) -> int:
    """Return the peak GPU memory of an update by the project's memory plan, in bytes, without the allowances for CUDA's
    context and without an engine; 0 on a CPU, or if the plan does not know the architecture."""
    if not bench.on_gpu:
        return 0
    try:
        moments = Memory(config, find(bench.model)).moments()
    except UserError:
        return 0
    return max(
        sum(p.bytes for p in moment.parts if p.name not in PROCESS_PARTS and not p.name.startswith("engine's"))
        for moment in moments
    )


def free_memory() -> None:
    """Free the memory of objects that are not used any more, on a GPU also what PyTorch keeps for later use."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def finish(bench: Bench) -> None:
    """Wait for the GPU."""
    if bench.on_gpu:
        torch.cuda.synchronize()
