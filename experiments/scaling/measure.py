"""Measures the costs of rank 0 of mtrl in a step on this machine: the lines of `costs.yaml` marked `measured`.

    python experiments/scaling/measure.py                     prints the costs, in a few minutes
    python experiments/scaling/measure.py --json costs.json   also writes them to a file

The measured code is mtrl's own, with synthetic rollouts (`synthetic.py`). The servers of an engine are a stand-in
process that answers immediately (`answering.py`). CPU seconds are those of all threads of the leader's process, in the
fastest of some repeats. Each figure is a least-squares fit over several sizes, and `…_off` is its largest relative
error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from answering import VOCABULARY
from answers import answer_costs
from synthetic import GROUP, batches_of, make_groups, make_samples

from mtrl.algorithms.advantages import turn_advantages
from mtrl.algorithms.signal import signal_metrics
from mtrl.config.algorithm_schema import AlgorithmConfig
from mtrl.config.engine_schema import VllmConfig
from mtrl.distributed.broadcast import flatten
from mtrl.engines.base import SamplingParams
from mtrl.engines.server.backend import ServerBackend
from mtrl.engines.server.checksum import checksum
from mtrl.engines.server.engine import ServerEngine
from mtrl.engines.server.router import ReplicaLoad, Router
from mtrl.engines.vllm.vllm_api import VllmApi
from mtrl.environments.base import BaseEnvironment
from mtrl.environments.pool import EnvironmentPool
from mtrl.models.renderer import make_renderer
from mtrl.models.tiny import train_tokenizer
from mtrl.record.trajectories import write_groups
from mtrl.rollout.conversation import Codec, Conversation
from mtrl.rollout.episode import EpisodeLimits, EpisodeLoop
from mtrl.rollout.rollouts import RolloutReport, Rollouts
from mtrl.trainer.data.admission import Admission
from mtrl.trainer.data.batching import balance
from mtrl.trainer.data.samples import group_samples, note_advantages, note_logprobs
from mtrl.trainer.flops import ModelFlops
from mtrl.trainer.rollout_metrics import rollout_metrics, staleness_metrics
from mtrl.trainer.update.update import per_sample
from mtrl.types import Group, Row
from mtrl.utils.process import settled

FOLDER = Path(__file__).parent
MIB = 2**20
MODEL = ModelFlops(7_000_000_000, 7_000_000_000, 600_000_000, 600_000_000, 4096, (None,) * 36)
"""Sizes of a model, of which only the FLOPs are used."""


def cpu_of(work: Callable[[], Any], repeats: int) -> float:
    """Return the least CPU seconds of some repeats."""

    def once() -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    return min(once() for _ in range(repeats))


def fit(rows: Sequence[Sequence[float]], found: Sequence[float]) -> tuple[list[float], float]:
    """Return coefficients of `rows`, none negative, by least squares of relative errors, and the largest error."""
    left, wanted = np.array(rows, float), np.array(found, float)
    scaled, used = left / wanted[:, None], list(range(left.shape[1]))
    while True:
        values = np.zeros(left.shape[1])
        values[used] = np.linalg.lstsq(scaled[:, used], np.ones(len(wanted)), rcond=None)[0]
        if (values >= 0).all():
            return values.tolist(), float(np.abs(scaled @ values - 1).max())
        used.remove(int(values.argmin()))


# -- a step's control plane -------------------------------------------------------------------------------------------


def credit(groups: list[Group]) -> tuple[list[Any], list[Any]]:
    """Return samples and advantages, as `Trainer._credit` does."""
    advantages = turn_advantages(groups, AlgorithmConfig(), {})
    pairs = zip(groups, advantages, strict=True)
    return [sample for group, turns in pairs for sample in group_samples(group, turns)], advantages


def learning_plane(groups: list[Group]) -> None:
    """Do the work of the update's thread without the hand-out: credit, packing, balancing."""
    samples, _ = credit(groups)
    batches = batches_of(samples, ranks=8)
    balance(batches, 8, MODEL)
    for batch in batches:
        per_sample(batch, batch.weights)


def telling_plane(groups: list[Group], folder: Path, keeps: bool) -> float:
    """Return the CPU seconds of the event loop after a step: metrics, and with `keeps` the stored trajectories."""
    samples, advantages = credit(groups)
    looked_at = [pair for batch in batches_of(samples) for pair in per_sample(batch, batch.weights)]
    start = time.process_time()
    signal_metrics(groups, advantages)
    rollout_metrics(RolloutReport(groups=groups))
    staleness_metrics(groups, 4)
    if keeps:
        note_advantages(groups, samples)
        note_logprobs(groups, looked_at)
        write_groups(folder, "train", 1, groups)
    return time.process_time() - start


def measure_planes(repeats: int) -> dict[str, Any]:
    """Return the CPU seconds of a step per trajectory, turn and token."""
    shapes = [(64, 1, 64, 64), (64, 1, 2048, 512), (64, 8, 64, 64), (64, 8, 256, 256), (32, 32, 128, 256)]
    rows, learning, telling, keeping = [], [], [], []
    with tempfile.TemporaryDirectory() as folder, settled():
        for trajectories, turns, sampled, observed in shapes:
            groups = make_groups(trajectories, turns, sampled, observed)
            rows.append([trajectories, trajectories * turns, trajectories * turns * (sampled + observed)])
            learning.append(cpu_of(partial(learning_plane, groups), repeats))
            telling.append(min(telling_plane(groups, Path(folder), False) for _ in range(repeats)))
            keeping.append(min(telling_plane(groups, Path(folder), True) for _ in range(repeats)))
    found = {}
    for name, seconds in (("learning_plane", learning), ("telling_plane", telling), ("keeping_plane", keeping)):
        (trajectory, turn, token), off = fit(rows, seconds)
        found |= {f"{name}_per_trajectory": trajectory, f"{name}_per_turn": turn}
        found |= {f"{name}_per_token": token, f"{name}_off": off}
    return found


# -- turns on the event loop ------------------------------------------------------------------------------------------


class Talker(BaseEnvironment):
    """Answers every turn immediately with the same text."""

    def __init__(self, max_turns: int, words: int):
        super().__init__(max_turns)
        self.text = "word " * words

    def step(self, response: str, ground_truth: dict[str, Any]) -> tuple[float, str, bool]:
        self.current_turn += 1
        return 0.0, self.text, self.current_turn >= self.max_turns


@contextmanager
def stand_ins(count: int) -> Iterator[list[str]]:
    """Start one process with `count` servers that answer immediately, and yield their URLs."""
    command = [sys.executable, str(FOLDER / "answering.py"), str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield [f"http://127.0.0.1:{port}" for port in json.loads(process.stdout.readline())]
        finally:
            process.kill()


def collect(urls: list[str], episodes: int, turns: int, sampled: int, words: int) -> tuple[list[float], float]:
    """Run episodes. Return the numbers of turns, of prompt tokens and of sampled tokens, and the CPU seconds."""
    tokenizer = train_tokenizer([[{"role": "user", "content": "word answer " * 50}]] * 4, VOCABULARY, ())
    settings = VllmConfig(urls=urls)
    backend = ServerBackend("vllm", settings, partial(VllmApi, settings=settings), lambda place: NotImplemented)
    with tempfile.TemporaryDirectory() as folder:
        engine = ServerEngine(
            backend,
            NoSync(),
            vocabulary=VOCABULARY,
            context=1 << 20,
            max_num_seqs=256,
            in_flight="continue",
            log_folder=Path(folder),
        )
    pool = EnvironmentPool(8)
    codec = Codec(tokenizer, make_renderer(tokenizer))
    limits = EpisodeLimits(turns, 1 << 20, step_timeout=600.0, episode_timeout=3600.0, retries=0)
    loop = EpisodeLoop(engine, partial(Talker, turns, words), partial(Conversation, codec), pool, limits)
    rollouts = Rollouts(loop, 0, max_failed_share=0.0)
    row = {"id": "0", "prompt": [{"role": "user", "content": "word " * words}], "ground_truth": {}}
    rows: list[Row] = [row] * (episodes // GROUP)

    async def run() -> tuple[list[float], float]:
        start = time.process_time()
        report = await rollouts.collect("step0", rows, GROUP, SamplingParams(max_generate_length=sampled))
        spent = time.process_time() - start
        await engine.close()
        return counted(report.groups), spent

    try:
        return asyncio.run(run())
    finally:
        pool.close()


class NoSync:
    """A weight sync that is never used."""

    async def close(self) -> None:
        """Do nothing: nothing is open."""


def counted(groups: list[Group]) -> list[float]:
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    every = [turn for trajectory in trajectories for turn in trajectory.turns]
    return [
        len(every),
        sum(sum(trajectory.contexts) for trajectory in trajectories),
        sum(len(turn.action_ids) for turn in every),
    ]


def measure_turns(repeats: int) -> dict[str, float]:
    """Return the CPU seconds of a turn on rank 0: router, HTTP and JSON, parsing, environment, tokenising."""
    shapes = [(64, 1, 32, 20), (64, 8, 32, 20), (32, 8, 512, 20), (32, 16, 32, 250), (16, 16, 256, 250)]
    with stand_ins(4) as urls, settled():
        collect(urls, 8, 2, 32, 20)
        best = [min((collect(urls, *shape) for _ in range(repeats)), key=lambda found: found[1]) for shape in shapes]
    (turn, prompt, sampled), off = fit([row for row, _ in best], [seconds for _, seconds in best])
    names = ("turn", "turn_per_prompt_token", "turn_per_sampled_token", "turn_off")
    return dict(zip(names, (turn, prompt, sampled, off), strict=True))


def measure_calls(servers: int = 64, rounds: int = 8) -> dict[str, float]:
    """CPU seconds of a short request to every server, as a weight sync makes several."""

    async def run(urls: list[str]) -> float:
        apis = [VllmApi(url, None, VllmConfig(urls=urls)) for url in urls]
        await asyncio.gather(*(api.version() for api in apis))
        start = time.process_time()
        for _ in range(rounds):
            await asyncio.gather(*(api.version() for api in apis))
        spent = time.process_time() - start
        await asyncio.gather(*(api.close() for api in apis))
        return spent / (rounds * servers)

    with stand_ins(servers) as urls:
        return {"call": asyncio.run(run(urls))}


def route(replicas: int, turns: int, limit: int = 160, trajectories: int = 0) -> float:
    """Return the CPU seconds of the router per turn, with `trajectories` conversations that each hold a slot."""

    async def run() -> float:
        router, numbers = Router([ReplicaLoad(True) for _ in range(replicas)], limit), iter(range(10**9))

        async def converse(name: str) -> None:
            for _ in range(turns):
                async with router.slot(name, next(numbers)):
                    await asyncio.sleep(0)
            router.release(name)

        count = trajectories or 8 * replicas
        start = time.process_time()
        await asyncio.gather(*(converse(f"group{i // GROUP}/{i % GROUP}") for i in range(count)))
        return (time.process_time() - start) / (count * turns)

    return asyncio.run(run())


def measure_router(repeats: int) -> dict[str, float]:
    """Return the CPU seconds of a turn's slot, as a fixed part and a part per server."""
    sizes = (2, 8, 32, 128, 512)
    found = [min(route(size, 8) for _ in range(repeats)) for size in sizes]
    (fixed, each), off = fit([[1, size] for size in sizes], found)
    return {"router_fixed": fixed, "router_per_replica": each, "router_off": off}


def measure_choosing(repeats: int, batch: int = 2048, lag: int = 4) -> dict[str, float]:
    """Return the CPU seconds of `Admission.choose` per outstanding group, while older groups than a finished batch are
    awaited."""
    admission = Admission(batch, lag)
    while admission.may_admit(0):
        admission.admit(lambda: {})
    newest = sorted(admission.outstanding, key=lambda group: group.number)[-batch:]
    return {"choose_per_group": cpu_of(lambda: admission.choose(newest), repeats) / len(admission.outstanding)}


# -- rollout workers --------------------------------------------------------------------------------------------------


def measure_answers(repeats: int) -> dict[str, float]:
    """Return the CPU seconds of rank 0 for a group of a rollout worker, and for telling a worker of new weights."""
    rows, found, call = asyncio.run(answer_costs(repeats))
    (answer, turn, token), off = fit(rows, found)
    names = ("answer", "answer_per_turn", "answer_per_token", "answer_off", "worker_call")
    return dict(zip(names, (answer, turn, token, off, call), strict=True))


# -- weights through the memory of rank 0's host ----------------------------------------------------------------------


def measure_host(repeats: int) -> dict[str, float]:
    """Return the CPU seconds per GiB of weights of each pass of a sync on the CPU, with one thread."""
    weights = {f"layer{i}": torch.randn(32 * MIB // 2).to(torch.bfloat16) for i in range(8)}
    gib = sum(value.nbytes for value in weights.values()) / 2**30
    passes = {
        "host_checksum": lambda: checksum(weights),
        "host_flatten": lambda: flatten(list(weights.values())),
    }
    return {f"{name}_per_gib": cpu_of(work, repeats) / gib for name, work in passes.items()}


# -- bytes ------------------------------------------------------------------------------------------------------------


def measure_bytes() -> dict[str, float]:
    """Return the bytes of rank 0's memory per token: of turns, of samples, and of the tensors of micro-batches."""
    shape = {"trajectories": 32, "turns": 4, "sampled": 256, "observed": 256}
    tokens = shape["trajectories"] * shape["turns"] * (shape["sampled"] + shape["observed"])
    tracemalloc.start()
    groups = make_groups(**shape)
    turns = tracemalloc.get_traced_memory()[0]
    samples, _ = credit(groups)
    both = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    batches = batches_of(make_samples(**shape))
    tensors = sum(v.nbytes for b in batches for v in vars(b).values() if isinstance(v, torch.Tensor))
    del samples
    return {
        "turn_bytes_per_token": turns / tokens,
        "sample_bytes_per_token": (both - turns) / tokens,
        "batch_bytes_per_token": tensors / tokens,
    }


# -- hand-out ---------------------------------------------------------------------------------------------------------


def measure_handout(sizes: Sequence[int]) -> dict[str, float]:
    """Return the wall seconds of `RankGroup.run` and the leader's CPU seconds, per rank and per MiB of all shares."""
    lines: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            out = Path(folder) / f"{size}.json"
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
            subprocess.run([*launch, str(FOLDER / "handout.py"), "--out", str(out)], check=True, timeout=300)
            lines += json.loads(out.read_text())
    rows = [[line["ranks"], line["ranks"] * line["bytes_per_rank"] / MIB] for line in lines]
    (rank, mib), off = fit(rows, [line["wall_s"] for line in lines])
    (cpu_rank, cpu_mib), cpu_off = fit(rows, [line["leader_cpu_s"] for line in lines])
    return {
        "handout_wall_per_rank": rank,
        "handout_wall_per_mib": mib,
        "handout_wall_off": off,
        "handout_cpu_per_rank": cpu_rank,
        "handout_cpu_per_mib": cpu_mib,
        "handout_cpu_off": cpu_off,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8], help="numbers of ranks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the costs to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    found = {
        **measure_planes(args.repeats),
        **measure_turns(args.repeats),
        **measure_calls(),
        **measure_router(args.repeats),
        **measure_choosing(args.repeats),
        **measure_answers(args.repeats),
        **measure_host(args.repeats),
        **measure_bytes(),
        **(measure_handout(args.ranks) if args.ranks else {}),
    }
    print(f"{os.cpu_count()} cores, torch {torch.__version__}, load average {before:.1f} to {os.getloadavg()[0]:.1f}")
    for name, value in found.items():
        print(f"{name}: {value:.4g}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
