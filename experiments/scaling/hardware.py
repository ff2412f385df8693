"""Seconds of the work of GPUs, networks and rank 0, from the costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
from costs import Costs
from server import Speed

from mtrl.trainer.data.batching import PACKED

if TYPE_CHECKING:
    from job import Episode, Plan, RunningGroup

GIB, MIB, GB = 2**30, 2**20, 1e9
NODE = 8
"""GPUs of a machine."""
BUCKET = 2**29
"""Bytes of one broadcast (`mtrl/engines/server/distributed_sync.py`)."""
CALLS = 7
"""Requests to each server at a sync beside one per bucket: pause, begin, check, finish, drop cache, version, resume."""
CELL, SAMPLED = 17.0, 28.0
"""Bytes of a packed `MicroBatch` for each token (id, position, mask), and further bytes for each sampled token (three
floats, two numbers)."""
LOGPROB = 4.0
"""Bytes of the answer for each sampled token."""
KEEPS = 10
"""Value of `trainer.save_trajectories_every`."""


@dataclass(frozen=True)
class Load:
    """Costs of one batch in training."""

    update: float
    """Seconds of the update on the trainers' GPUs."""
    credit: float
    """CPU seconds of rank 0 for advantages, samples, packing and balancing."""
    handout_cpu: float
    """CPU seconds of rank 0 for handing the batch out and reading the answers."""
    handout_network: float
    """Seconds of the network for shares and answers."""
    handout_bytes: float
    """Bytes on the network. Every share is as long as the longest one."""
    sampled: int
    """Number of sampled tokens."""
    tokens: int
    """Number of all tokens."""


@dataclass(frozen=True)
class Hardware:
    costs: Costs

    # -- GPUs ---------------------------------------------------------------------------------------------------------

    def speed(self, plan: Plan) -> Speed:
        """Return the speed of one server."""
        costs, work, gpus = self.costs, plan.workload, plan.workload.tensor_parallel
        model = work.architecture
        read = costs["hbm"] * costs["hbm_share"] * gpus * GB
        arithmetic = costs["peak"] * 1e12 * gpus
        forward = 2.0 * model.parameters
        weights = 2.0 * model.parameters
        return Speed(
            fixed=costs["iteration"] + weights / read,
            per_cached_token=model.cached(2) / read,
            per_turn=forward / (arithmetic * costs["decode_mfu"]),
            per_prompt_token=forward / (arithmetic * costs["prefill_mfu"]),
            slots=round(costs["slots"]),
            room=(costs["memory"] * costs["memory_share"] * gpus * GB - weights) / model.cached(2),
        )

    def load(self, plan: Plan, episodes: Sequence[Episode]) -> Load:
        """Return the costs of a batch. It is packed by mtrl's own first-fit and balanced as in
        `mtrl/trainer/data/batching.py`: in each round the ranks get micro-batches of similar cost, and the round takes
        as long as the most expensive one."""
        costs, work, times = self.costs, plan.workload, plan.times
        ranks = max(1, plan.trainers // times)
        lengths = [episode.context for episode in episodes]
        sampled = [sum(turn.sampled for turn in episode.turns) for episode in episodes]
        turns = sum(len(episode.turns) for episode in episodes)
        packs = PACKED.partition([[SimpleNamespace(token_ids=range(length))] for length in lengths], work.micro_batch)
        flops = np.array([work.flops.training([lengths[i] for i in p], sum(sampled[i] for i in p)) for p in packs])
        heads = np.sort(flops)[::-1][::ranks]
        update = float(np.maximum(heads / (costs["peak"] * 1e12 * costs["mfu"]), self._meeting(plan)).sum())
        sizes = np.array([CELL * sum(lengths[i] for i in p) + SAMPLED * sum(sampled[i] for i in p) for p in packs])
        answers = np.array([LOGPROB * sum(sampled[i] for i in p) for p in packs])
        travels = ranks * float(np.sort(sizes)[::-1][::ranks].sum() + np.sort(answers)[::-1][::ranks].sum())
        travels *= times
        receivers = plan.trainers if plan.trainers > 1 else 0
        return Load(
            update=update,
            credit=times * self._plane("learning_plane", len(episodes), turns, sum(lengths)),
            handout_cpu=receivers * costs["handout_cpu_per_rank"] + costs["handout_cpu_per_mib"] * travels / MIB,
            handout_network=receivers * costs["handout_wait_per_rank"] + travels / GB * costs["ethernet_per_gb"],
            handout_bytes=travels,
            sampled=times * sum(sampled),
            tokens=times * sum(lengths),
        )

    def _meeting(self, plan: Plan) -> float:
        """Return the seconds in which the ranks gather all layers twice in bfloat16 and add up gradients in float32."""
        if plan.trainers == 1:
            return 0.0
        link = "nvlink" if plan.trainers <= NODE else "fabric"
        return 8.0 * plan.workload.architecture.parameters / (self.costs[link] * GB)

    # -- rank 0's interpreter -----------------------------------------------------------------------------------------

    def turn(self, plan: Plan, context: int, sampled: int) -> float:
        """Return the CPU seconds of one turn: its place at a server, the request, the answer, the environment, and the
        text of both. A rollout worker has a share of the servers."""
        costs = self.costs
        tokens = costs["turn_per_prompt_token"] * context + costs["turn_per_sampled_token"] * sampled
        if plan.workers:  # each worker is simulated with all its turns
            return costs["turn"] + tokens + costs["router_per_replica"] * max(1, plan.servers // plan.workers)
        return plan.times * (costs["turn"] + tokens + costs["router_per_replica"] * plan.servers)

    def answer(self, plan: Plan, group: RunningGroup) -> float:
        """Return the CPU seconds of requesting a group from a rollout worker and reading it; 0 without workers."""
        if not plan.workers:
            return 0.0
        costs = self.costs
        turns = sum(len(episode.turns) for episode in group.episodes)
        tokens = sum(episode.context for episode in group.episodes)
        each = costs["answer"] + costs["answer_per_turn"] * turns + costs["answer_per_token"] * tokens
        return plan.times * each

    def choosing(self, plan: Plan, outstanding: int) -> float:
        """Return the CPU seconds of `Admission.choose`, which sorts all outstanding groups."""
        return plan.times**2 * self.costs["choose_per_group"] * outstanding

    def reporting(self, plan: Plan, groups: Sequence[RunningGroup]) -> float:
        """Return the CPU seconds for the metrics of a step and for the trajectory files, as the mean over steps."""
        episodes = [episode for group in groups for episode in group.episodes]
        sizes = (len(episodes), sum(len(e.turns) for e in episodes), sum(e.context for e in episodes))
        every, some = self._plane("telling_plane", *sizes), self._plane("keeping_plane", *sizes)
        return plan.times * (every + max(0.0, some - every) / KEEPS)

    def _plane(self, name: str, trajectories: int, turns: int, tokens: int) -> float:
        costs = self.costs
        each = costs[f"{name}_per_trajectory"] * trajectories + costs[f"{name}_per_turn"] * turns
        return each + costs[f"{name}_per_token"] * tokens

    def memory(self, plan: Plan, load: Load) -> float:
        """Return the peak bytes in the memory of rank 0's host: the trajectories of K + 1 batches, the samples, tensors
        and pickles of one batch, and the weights of two versions in bfloat16."""
        turns = (plan.lag + 1) * load.tokens * self.costs["turn_bytes_per_token"]
        batch = load.tokens * (self.costs["sample_bytes_per_token"] + CELL) + load.sampled * SAMPLED
        return turns + batch + load.handout_bytes + self._weights(plan) * 2 * 2

    # -- new weights --------------------------------------------------------------------------------------------------

    def _weights(self, plan: Plan) -> int:
        return plan.workload.architecture.parameters

    def sync_before(self, plan: Plan) -> float:
        """Return the seconds of the sync before the servers pause: gathering in bfloat16, bucket by bucket, and moving
        to the host's memory."""
        return 2.0 * self._weights(plan) / GB * (self.costs["gather_per_gb"] + self.costs["device_to_host_per_gb"])

    def sync_host(self, plan: Plan) -> float:
        """Return the seconds of the host during the pause: checksums, one buffer, and back to the GPU."""
        size = 2.0 * self._weights(plan)
        passes = sum(self._host(name, size) for name in ("host_checksum", "host_flatten"))
        return passes + size / GB * self.costs["host_to_device_per_gb"]

    def sync_calls(self, plan: Plan) -> float:
        """Return the CPU seconds of rank 0's requests to all servers, and to all rollout workers: each stops to send
        turns, and gets the new version."""
        buckets = -(-2 * self._weights(plan) // BUCKET)
        return self.costs["call"] * plan.servers * (CALLS + buckets) + 2 * self.costs["worker_call"] * plan.workers

    def sync_network(self, plan: Plan) -> float:
        """Return the seconds of the broadcast in bfloat16, and for colocated servers those of sleep and wake-up."""
        seconds = 2.0 * self._weights(plan) / GB * self.costs["broadcast_per_gb"]
        return seconds + (self.costs["sleep_and_wake"] if plan.colocated else 0.0)

    def _host(self, name: str, size: float) -> float:
        """Return the seconds of a pass over weights of `size` bytes, with the threads of a rank."""
        threads = self.costs["host_threads"]
        return self.costs[f"{name}_per_gib"] * size / GIB / threads if threads else 0.0
