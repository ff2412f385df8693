"""The case of a checkpoint: a resumed learner has the same bits, and its next update gives the same bits."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from mtrl.doctor.self_test.bench import Bench
from mtrl.doctor.self_test.outcome import CaseResult, judged
from mtrl.doctor.self_test.workload import make_samples, new_learner, update, vocabulary
from mtrl.trainer.checkpoint.checkpoint import Checkpoints
from mtrl.trainer.update.learner import alone


def resume(bench: Bench) -> CaseResult:
    """Save after an update, go on, load in another learner, and go on there."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # products with the same bits each time
    # With mere warnings the flash kernel stays in its other mode, which adds gradients in any order.
    torch.use_deterministic_algorithms(True, warn_only=not bench.on_gpu)
    config = bench.config(bench.half)
    learner = new_learner(bench, config)
    learners, samples = alone(learner), make_samples(bench, vocabulary(learner))
    update(bench, config, learners, samples, 0)
    saved = _copied(learner.state())
    checkpoints = Checkpoints(Path(bench.scratch) / "checkpoints")
    start = time.perf_counter()
    partial = checkpoints.begin(1)
    learners.save(partial, lambda: checkpoints.commit(partial, {"step": 1}))
    learners.wait_saved()
    writing = time.perf_counter() - start
    update(bench, config, learners, samples, 1)
    after = dict(learners.weights())
    del learners, learner

    other = new_learner(bench, config)
    checkpoint, _ = checkpoints.read_newest()
    start = time.perf_counter()
    alone(other).load(checkpoint.path)
    reading = time.perf_counter() - start
    lost = _different(_copied(other.state()), saved)
    update(bench, config, alone(other), samples, 1)
    drifted = _different(dict(alone(other).weights()), after)
    return _outcome(sum(value.nbytes for value in saved.values()), writing, reading, lost, drifted)


def _outcome(size: int, writing: float, reading: float, lost: list[str], drifted: list[str]) -> CaseResult:
    problem = ""
    if lost:
        problem = f"{len(lost)} tensors of the checkpoint have other bits, such as {lost[0]}"
    elif drifted:
        problem = f"{len(drifted)} tensors have other bits after the next update, such as {drifted[0]}"
    evidence = f"same bits; write {size / writing / 1e9:.2g} GB/s, read {size / reading / 1e9:.2g} GB/s"
    figures = {"bytes": size, "write_gb_per_second": size / writing / 1e9, "read_gb_per_second": size / reading / 1e9}
    return judged(problem, evidence.removeprefix("same bits; ") if problem else evidence, figures)


def _copied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies in CPU memory; of a sharded tensor, the shard of this process."""
    own = {name: getattr(value, "to_local", lambda value=value: value)() for name, value in state.items()}
    return {name: value.detach().to("cpu", copy=True) for name, value in own.items()}


def _different(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors that differ, or that one of the two lacks."""
    return sorted(
        name
        for name in one.keys() | other.keys()
        if name not in one or name not in other or not torch.equal(one[name], other[name])
    )
