"""Turns per second of rollout workers and of one process, CPU time that a worker adds to a turn, and its memory.

    python benchmarks/rollout_workers.py                    one process, and 1, 2 and 4 workers, in 5 rounds
    python benchmarks/rollout_workers.py --workers 8 --rounds 3

The engine is the scripted one, which takes no time. Each step of the environment repeats a hash that takes `--step-ms`
of one quiet core, and holds the interpreter while it does; conversations are rendered and tokenised as in a run. Every
way samples the same groups, all requested at the same time, and must return the same token ids. The ways run one after
the other in each round, in the opposite order in every second round, and ratios are taken within a round.

CPU time of a turn is that of all threads: of this process (the leader), of the workers of the way, and of Ray's own
servers, without the CPU time that they spend per second when no group is sampled, which is measured first. `x if quiet`
is the ratio that CPU time allows on `--cores` cores without other work: turns per second are then limited by the
busiest process and by the sum of all processes. It does not count the time in which processes wait for messages.

The exit status is 1 if the ways returned different token ids, or if a worker was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mtrl.engines.base import SamplingParams
from mtrl.engines.scripted import ScriptedEngine
from mtrl.environments.base import BaseEnvironment
from mtrl.environments.pool import EnvironmentPool
from mtrl.models.renderer import make_renderer
from mtrl.models.tiny import train_tokenizer
from mtrl.rollout.cluster import RayCluster
from mtrl.rollout.conversation import Codec, Conversation
from mtrl.rollout.episode import EpisodeLimits, EpisodeLoop
from mtrl.rollout.resources import WorkerResources
from mtrl.rollout.rollouts import Rollouts
from mtrl.rollout.workers import WorkerRollouts, Workers
from mtrl.sandbox.execution import process_tree, proportional_memory
from mtrl.types import Row
from mtrl.utils.process import settle, settled

ONE = "one process"
SENTENCE = "the price of this item is not known here, so look for it in the list of all that is sold"
TIMEOUT = 600.0
"""Time limit of any answer of a worker, in seconds."""
Costs = dict[str, float]
"""Seconds by clock: `wall`, and CPU seconds of the `leader`, the `workers` and the `servers` of Ray."""
TICKS = os.sysconf("SC_CLK_TCK")
"""Units of CPU time in `/proc/PID/stat` per second."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the sampled groups. Each field is a command-line option."""

    groups: int = 32
    group_size: int = 8
    turns: int = 8
    words: int = 60
    """Number of words of a response, and of an observation."""
    step_ms: float = 3.0
    """CPU time of a step of the environment, in ms of a quiet core."""
    rounds: int = 5
    idle_seconds: float = 10.0
    """Time over which the CPU time without work is measured."""
    cores: int = 2
    """Number of cores for which `x if quiet` is computed."""


# -- the sampled groups ------------------------------------------------------------------------------------------------


class Hashing(BaseEnvironment):
    """Computes a repeated hash in every step, and answers with the same sentence."""

    def __init__(self, max_turns: int, words: int, hashes: int):
        super().__init__(max_turns)
        self.text, self.hashes = sentence(words, 0), hashes

    def step(self, response: str, ground_truth: dict[str, Any]) -> tuple[float, str | None, bool]:
        self.current_turn += 1
        done = self.current_turn >= self.max_turns
        return float(work(response, self.hashes)[0] % 2), None if done else self.text, done


def work(text: str, hashes: int) -> bytes:
    """Return the hash of a hash, and so on: `hashes` times, while other Python threads wait."""
    digest = text.encode()
    for _ in range(hashes):
        digest = hashlib.blake2b(digest, digest_size=32).digest()
    return digest


def hashes_for(milliseconds: float) -> int:
    """Return the number of hashes that take this CPU time in this process, by the fastest of five measurements."""
    count = 2000

    def measured() -> float:
        start = time.thread_time()
        work("", count)
        return time.thread_time() - start

    return max(1, round(count * milliseconds / 1000 / min(measured() for _ in range(5))))


def sentence(words: int, start: int) -> str:
    all_words = SENTENCE.split()
    return " ".join(all_words[(start + n) % len(all_words)] for n in range(words))


def respond(words: int, trajectory_id: str, turn: int) -> str:
    return sentence(words, len(trajectory_id) + turn)


def make_codec() -> Codec:
    tokenizer = train_tokenizer([[{"role": "user", "content": SENTENCE}] * 20], 400)
    return Codec(tokenizer, make_renderer(tokenizer))


def make_loop(sizes: Sizes, hashes: int) -> EpisodeLoop:
    """Make the loop of the episodes, as `mtrl.trainer.setup.parts` does it."""
    codec = make_codec()
    environment = partial(Hashing, sizes.turns, sizes.words, hashes)
    limits = EpisodeLimits(sizes.turns, 2**20, step_timeout=TIMEOUT, episode_timeout=TIMEOUT, retries=0)
    engine = ScriptedEngine(partial(respond, sizes.words), codec.tokenizer)
    return EpisodeLoop(engine, environment, partial(Conversation, codec), EnvironmentPool(16), limits)


# -- measurement -------------------------------------------------------------------------------------------------------


class Ways:
    """One process and every number of workers, which sample the same groups. All workers are in one cluster of Ray, and
    those of a way that is not measured have no work."""

    def __init__(self, sizes: Sizes, counts: Sequence[int], hashes: int):
        self.sizes, self.loop = sizes, make_loop(sizes, hashes)
        self.sampling = SamplingParams(stop_token_ids=make_codec().stop_token_ids)
        self.cluster = RayCluster((partial(make_loop, sizes, hashes), 0, settle), sum(counts), WorkerResources(), 0)
        self.workers = {name_of(count): Workers(self.cluster, count, TIMEOUT) for count in counts}
        self.processes: dict[str, set[int]] = {ONE: set()}
        """Process ids of the workers, by way."""

    async def start(self) -> None:
        for name, workers in self.workers.items():
            before = actors()
            await workers.start()
            self.processes[name] = actors() - before

    async def collect(self, way: str, groups: int) -> tuple[Costs, Any]:
        """Sample the groups in one way. Return the costs per turn, in seconds by clock, and the token ids."""
        rows: list[Row] = [
            {"id": str(n), "prompt": [{"role": "user", "content": sentence(40, n)}], "ground_truth": {}}
            for n in range(groups)
        ]
        rollouts = Rollouts(self.loop, 0, 0.0)
        if way != ONE:
            rollouts = WorkerRollouts(self.loop, 0, 0.0, workers=self.workers[way])
        before = self.clocks(way)
        report = await rollouts.collect("step", rows, self.sizes.group_size, self.sampling)
        costs = difference(self.clocks(way), before)
        turns = groups * self.sizes.group_size * self.sizes.turns
        ids = [[[turn.action_ids for turn in t.turns] for t in g.trajectories] for g in report.groups]
        return {clock: seconds / turns for clock, seconds in costs.items()}, ids

    async def idle(self, way: str) -> Costs:
        """Return the seconds per second of each clock while no group is sampled."""
        before = self.clocks(way)
        await asyncio.sleep(self.sizes.idle_seconds)
        costs = difference(self.clocks(way), before)
        return {clock: seconds / costs["wall"] for clock, seconds in costs.items()}

    async def measure(self) -> tuple[dict[str, list[Costs]], dict[str, Costs], bool]:
        """Run all rounds, after a few groups in each way that are not measured. Return the costs by way, one per round,
        the costs without work by way, and whether all ways returned the same token ids and no worker was lost."""
        names, same = list(self.processes), True
        for name in names:
            await self.collect(name, 8)
        idle = dict(zip(names, await asyncio.gather(*map(self.idle, names)), strict=True))
        found: dict[str, list[Costs]] = {name: [] for name in names}
        for number in range(self.sizes.rounds):
            ids = {}
            for name in names if number % 2 == 0 else names[::-1]:
                costs, ids[name] = await self.collect(name, self.sizes.groups)
                found[name].append(costs)
            same &= all(each == ids[ONE] for each in ids.values())
        restarts = sum(workers.stats.extra["worker_restarts"] for workers in self.workers.values())
        return found, idle, same and not restarts

    def clocks(self, way: str) -> Costs:
        """Return the wall clock, and the CPU seconds of the leader, the workers of a way, and Ray's servers."""
        workers = sum(map(cpu_of, self.processes[way]))
        return {"wall": time.perf_counter(), "leader": time.process_time(), "workers": workers} | {
            "servers": sum(map(cpu_of, servers()))
        }


def difference(after: Costs, before: Costs) -> Costs:
    return {clock: after[clock] - before[clock] for clock in after}


def name_of(count: int) -> str:
    return f"{count} worker{'s' * (count > 1)}"


def actors() -> set[int]:
    """Return the process ids of the workers below this process, which have names of Ray."""
    return {pid for pid in process_tree(os.getpid()) if "_Actor" in command(pid)}


def servers() -> set[int]:
    """Return the process ids of Ray's servers."""
    return process_tree(os.getpid()) - actors() - {os.getpid()}


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:  # the process has ended
        return ""


def cpu_of(pid: int) -> float:
    """Return the CPU seconds of all threads of a process (proc(5): utime and stime), 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


# -- the result --------------------------------------------------------------------------------------------------------


def busy(costs: Costs, idle: Costs) -> Costs:
    """Return the CPU seconds of a turn without those that the same wall time costs when no group is sampled."""
    return {clock: max(0.0, costs[clock] - idle[clock] * costs["wall"]) for clock in ("leader", "workers", "servers")}


def quiet_wall(cpu: Costs, count: int, cores: int) -> float:
    """Return the seconds of a turn on `cores` cores without other work, from CPU seconds."""
    return max(cpu["leader"], cpu["workers"] / max(1, count), sum(cpu.values()) / cores)


def summary(sizes: Sizes, found: dict[str, list[Costs]], idle: dict[str, Costs], counts: Sequence[int]) -> Any:
    """Return medians over the rounds; ratios and differences are taken within a round."""
    rows: dict[str, Any] = {}
    one = [busy(costs, idle[ONE]) for costs in found[ONE]]
    for name, count in [(ONE, 0), *((name_of(count), count) for count in counts)]:
        mine = [busy(costs, idle[name]) for costs in found[name]]
        walls = [(a["wall"], b["wall"]) for a, b in zip(found[ONE], found[name], strict=True)]
        pairs = list(zip(one, mine, strict=True))
        rows[name] = {
            "turns_per_s": statistics.median(1 / wall for _, wall in walls),
            "ratio": statistics.median(alone / wall for alone, wall in walls),
            "quiet_ratio": statistics.median(
                quiet_wall(a, 0, sizes.cores) / quiet_wall(b, count, sizes.cores) for a, b in pairs
            ),
            "cpu_ms": {clock: 1000 * statistics.median(cpu[clock] for cpu in mine) for clock in mine[0]},
            "added_cpu_ms": 1000 * statistics.median(sum(b.values()) - sum(a.values()) for a, b in pairs),
        }
    return rows


def measure(sizes: Sizes, counts: Sequence[int]) -> dict[str, Any]:
    hashes, load = hashes_for(sizes.step_ms), [os.getloadavg()[0]]
    ways = Ways(sizes, counts, hashes)

    async def run() -> tuple[dict[str, list[Costs]], dict[str, Costs], bool]:
        await ways.start()
        return await ways.measure()

    try:
        with settled():
            found, idle, is_sound = asyncio.run(run())
        worker = statistics.median(proportional_memory(pid) for pid in actors())
        memory = {"worker": worker / 2**20, "servers": sum(map(proportional_memory, servers())) / 2**20}
    finally:
        ways.cluster.close()
    return {
        "sizes": asdict(sizes),
        "ways": summary(sizes, found, idle, counts),
        "rounds": found,
        "idle": idle,
        "is_sound": is_sound,
        "memory_mib": memory,
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
        "load_average": [*load, os.getloadavg()[0]],
    }


def table(result: dict[str, Any]) -> str:
    sizes, on, memory = result["sizes"], result["machine"], result["memory_mib"]
    before, after = result["load_average"]
    lines = [
        f"{sizes['groups']} groups of {sizes['group_size']}, {sizes['turns']} turns of {sizes['words']} words, steps "
        f"of {sizes['step_ms']:g} ms; {sizes['rounds']} rounds",
        f"{on['cores']} cores, load average {before:.1f} to {after:.1f}; Python {on['python']}",
        "",
        "| way | turns/s | x | x if quiet | CPU ms of a turn: leader | workers | Ray | added CPU ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in result["ways"].items():
        cpu = " | ".join(f"{value:.2f}" for value in row["cpu_ms"].values())
        lines.append(
            f"| {name} | {row['turns_per_s']:.0f} | {row['ratio']:.2f} | {row['quiet_ratio']:.2f} | {cpu} "
            f"| {row['added_cpu_ms']:+.2f} |"
        )
    lines += ["", f"memory (PSS): {memory['worker']:.0f} MiB per worker, {memory['servers']:.0f} MiB for Ray's servers"]
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in asdict(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help="%(default)s")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], help="numbers of workers; 1 2 4")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all rounds to this file")
    args = parser.parse_args(words)
    sizes = Sizes(**{name: getattr(args, name) for name in asdict(Sizes())})
    for name, value in [*asdict(sizes).items(), *(("workers", count) for count in args.workers)]:
        if value <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    result = measure(sizes, sorted(set(args.workers)))
    print(table(result))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if not result["is_sound"]:
        print("the ways returned different token ids, or a worker was lost")
    return 0 if result["is_sound"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
