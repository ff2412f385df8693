"""CPU and wall seconds of a training step without the model: the work of mtrl around sampling and learning.

    python benchmarks/control_plane.py                     128 prompts x 8 rollouts x 8 turns x 1,000 sampled tokens
    python benchmarks/control_plane.py --against FOLDER    also another checkout of mtrl, alternately

The engine and the ranks are stand-ins that answer immediately. All other work is done by the code of a run:
conversations, Qwen3's renderer over a byte-level BPE, a tool that answers with text, rewards, advantages, samples,
micro-batches for one rank and for many, the messages to the ranks and their answers, metrics, and the trajectories on
the disk. The time of the leader's thread is divided into parts that do not overlap. The CPU time of other threads
during the episodes belongs to the part `environments`.

The sum is compared with training steps that others have published: with the published time, and with the time of these
sampled tokens at the published tokens per second. A run keeps the trajectories of every tenth step by default
(`trainer.save_trajectories_every`), so one sum includes a tenth of the cost of keeping them. Another sum includes only
the work after the rollouts, while no token is sampled; all other work runs while a server samples.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pickle
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import simulated
import torch
import transformers
from cost import Cost

from mtrl.algorithms.advantages import turn_advantages
from mtrl.algorithms.signal import signal_metrics
from mtrl.config.algorithm_schema import AlgorithmConfig
from mtrl.config.schema import Config, RewardConfig
from mtrl.config.trainer_schema import TrainerConfig
from mtrl.engines.base import SamplingParams
from mtrl.environments.family import reward_is_success
from mtrl.environments.pool import EnvironmentPool
from mtrl.record.metrics import MetricsLog
from mtrl.record.trajectories import write_groups
from mtrl.rewards.compose import RewardComposer
from mtrl.rollout.conversation import Codec, Conversation
from mtrl.rollout.episode import EpisodeLimits, EpisodeLoop
from mtrl.rollout.rollouts import RolloutReport, Rollouts
from mtrl.trainer.data.samples import group_samples, note_advantages, note_logprobs
from mtrl.trainer.flops import ModelFlops
from mtrl.trainer.rollout_metrics import rollout_metrics, staleness_metrics
from mtrl.trainer.throughput import Throughput
from mtrl.trainer.update.learner import Learners
from mtrl.trainer.update.update import Updater, UpdateResult
from mtrl.trainer.update.update_report import UpdateReport
from mtrl.types import Generation, Group, Message, Sample
from mtrl.utils.process import settled

ONE, MANY, ENGINE = "batches, 1 rank", "batches, {ranks} ranks", "(engine)"
SAMPLING = ("tokenise", "parse", "environments", "episodes")
"""Parts of an episode, which run while other episodes are sampled. The other parts run after the rollouts."""
WRITTEN = ("notes", "trajectories")
"""Parts of those steps only whose trajectories are stored."""
EVERY, USUAL, AFTER = "all, with 1 rank left out", "all, every 10th step kept", "the same, after the rollouts"
FLOPS = ModelFlops(7 * 10**9, 7 * 10**9, 545 * 10**6, 545 * 10**6, 3584, (None,) * 28)
"""FLOPs of a model of 7 B parameters, by which micro-batches are distributed among the ranks."""


@dataclass(frozen=True)
class Anchor:
    """A training step that others have published."""

    name: str
    seconds: float | None
    """Published seconds of the step."""
    tokens_per_second: float | None
    """Published tokens per second of all GPUs together."""


ANCHORS = (
    Anchor("verl, ReTool over many turns, 7B, 32 H20, synchronous", 375.5, None),
    Anchor("verl, the same, asynchronous", 221.4, None),
    Anchor("verl V1, 35B-A3B, 4 nodes, asynchronous", None, 18_852),
    Anchor("NeMo-RL, 30B-A3B, 32 H100, one step off", 152.0, 32 * 1414),
    Anchor("NeMo-RL, the same per GPU, on 64", None, 64 * 1414),
    Anchor("NeMo-RL, DeepSeek-V3, 512 H100, FP8, one step off", 59.2, None),
)
TARGET = 0.05
"""Greatest share of a published step that this work should take."""
TOKENS = 128 * 8 * 8 * 1000
"""Number of sampled tokens whose cost is compared with published seconds. Costs of other sizes are scaled linearly."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measured step. Each field is a command-line option."""

    prompts: int = 128
    group_size: int = 8
    turns: int = 8
    tokens: int = 1000
    """Number of sampled tokens per turn, including the tool call."""
    observation_characters: int = 800
    prompt_tokens: int = 300
    ranks: int = 64
    micro_batch_tokens: int = 32_768
    vocabulary: int = 32_000
    text_characters: int = 4_000_000
    """Number of characters of the text on which the tokenizer is trained and from which turns are cut."""
    seed: int = 0


@dataclass
class Clock:
    """Divides the time of this thread into parts. While an inner part runs, the outer part is stopped."""

    parts: dict[str, Cost] = field(default_factory=dict)
    _stack: list[str] = field(default_factory=list)
    _since: Cost = field(default_factory=Cost)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._switch(name)
        try:
            yield
        finally:
            self._switch(None)

    def _switch(self, name: str | None) -> None:
        """Add the time since the last switch to the running part. Then start part `name`, or with None continue the
        outer part."""
        now = Cost(time.perf_counter(), time.thread_time())
        if self._stack:
            self.parts[self._stack[-1]] = self.parts.get(self._stack[-1], Cost()) + now - self._since
        self._since = now
        if name is None:
            self._stack.pop()
        else:
            self._stack.append(name)


CLOCK = Clock()


class TimedCodec(Codec):
    """Codec whose time belongs to the parts `tokenise` and `parse`."""

    def render(self, *args: Any) -> list[int]:
        with CLOCK.part("tokenise"):
            return super().render(*args)

    def extend(self, *args: Any) -> list[int] | None:
        with CLOCK.part("tokenise"):
            return super().extend(*args)

    def decode(self, ids: list[int]) -> str:
        with CLOCK.part("parse"):
            return super().decode(ids)

    def parse(self, *args: Any) -> Message:
        with CLOCK.part("parse"):
            return super().parse(*args)


class TimedEngine(simulated.CannedEngine):
    """Engine whose time belongs to a part of its own, which the sums leave out."""

    def sample(self, trajectory_id: str, prompt: Any) -> Generation:
        with CLOCK.part(ENGINE):
            return super().sample(trajectory_id, prompt)


class TimedPages(simulated.Pages):
    """Environment whose time on the event loop belongs to the part `environments`."""

    async def respond(self, *args: Any) -> Any:
        return await TimedCoroutine(super().respond(*args))


class TimedCoroutine:
    """Awaits a coroutine; the time of each of its steps belongs to the part `environments`."""

    def __init__(self, coroutine: Any):
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Callable[[], Any] = partial(self._coroutine.send, None)
        while True:
            try:
                with CLOCK.part("environments"):
                    waiting_for = step()
            except StopIteration as end:
                return end.value
            try:
                step = partial(self._coroutine.send, (yield waiting_for))
            except BaseException as error:
                step = partial(self._coroutine.throw, error)


class Ranks:
    """Stand-in for the rank group of a run. It pickles the message to each rank, as for another process, and answers
    immediately."""

    def __init__(self, size: int):
        self.world = SimpleNamespace(size=size)
        self.sent: list[int] = []
        """Number of bytes sent to each rank."""

    def run(self, method: str, shares: Sequence[tuple[Any, ...]], *common: Any) -> list[UpdateReport]:
        """Return one report per rank, with log-probs for its micro-batches."""
        if self.world.size > 1:
            with CLOCK.part("hand-out"):
                self.sent = [len(pickle.dumps(share)) for share in shares]
        with CLOCK.part(ENGINE):
            reports = [
                UpdateReport(
                    updates=1,
                    trained_tokens=1,
                    first_logprobs=[b.rollout_logprobs - 0.01 for hand in parts for b in hand if not b.is_filler],
                )
                for (parts,) in shares
            ]
            answers = [pickle.dumps(report) for report in reports]
        if self.world.size == 1:
            return reports
        with CLOCK.part("hand-out"):
            return [pickle.loads(answer) for answer in answers]


class Bench:
    """One training step, assembled as in `mtrl.trainer.setup.parts` and `mtrl.trainer.loop`."""

    def __init__(self, sizes: Sizes, tokenizer: str | None):
        self.sizes = sizes
        text = simulated.library(sizes.text_characters)
        codec = simulated.make_codec(text, sizes.vocabulary, tokenizer)
        codec = TimedCodec(codec.tokenizer, codec.renderer)
        self.config = Config(
            seed=sizes.seed,
            algorithm=AlgorithmConfig(group_size=sizes.group_size),
            trainer=TrainerConfig(max_tokens_per_microbatch=sizes.micro_batch_tokens, packing=True),
        )
        self.rows = simulated.make_rows(codec, text, sizes.prompts, sizes.prompt_tokens)
        self.pool = EnvironmentPool(self.config.environment.max_workers)
        environment = partial(TimedPages, sizes.turns, text, sizes.observation_characters)
        limits = EpisodeLimits(sizes.turns, 2**24, step_timeout=600.0, episode_timeout=3600.0, retries=0)
        engine = TimedEngine(codec, text, sizes.turns, sizes.tokens, sizes.seed)
        loop = EpisodeLoop(engine, environment, partial(Conversation, codec), self.pool, limits)
        self.rollouts = Rollouts(loop, sizes.seed, max_failed_share=0.0)
        self.sampling = SamplingParams(max_generate_length=sizes.tokens, stop_token_ids=codec.stop_token_ids)
        self.composer = RewardComposer(RewardConfig())
        self.sent: list[int] = []

    def run(self, folder: Path) -> None:
        """Run the timed work of the step. The times of its parts are in `CLOCK`."""
        report = asyncio.run(self._collect())
        self.pool.close()
        groups = report.groups
        with CLOCK.part("advantages"):
            advantages = turn_advantages(groups, self.config.algorithm, self.composer.weights)
        with CLOCK.part("samples"):
            pairs = zip(groups, advantages, strict=True)
            samples = [sample for group, turns in pairs for sample in group_samples(group, turns)]
        with CLOCK.part(ONE):
            self._update(samples, 1, folder)
        with CLOCK.part(MANY.format(ranks=self.sizes.ranks)):
            update = self._update(samples, self.sizes.ranks, folder)
        with CLOCK.part("metrics"):
            self._metrics(report, advantages, update, folder)
        with CLOCK.part("notes"):
            note_advantages(groups, samples)
            note_logprobs(groups, update.first_logprobs)
        with CLOCK.part("trajectories"):
            path = write_groups(folder, "train", 1, groups)
        turns = [turn for group in groups for t in group.trajectories for turn in t.turns]
        self.counts = {
            "trajectories": sum(len(group.trajectories) for group in groups),
            "turns": len(turns),
            "sampled": sum(len(turn.action_ids) for turn in turns),
            "context": sum(len(sample.token_ids) for sample in samples),
            "samples": len(samples),
            "file_bytes": path.stat().st_size,
            "sent_bytes": sum(self.sent),
            "sent_bytes_most": max(self.sent, default=0),
        }

    async def _collect(self) -> RolloutReport:
        before = time.process_time(), time.thread_time()
        with CLOCK.part("episodes"):
            report = await self.rollouts.collect("step0", self.rows, self.sizes.group_size, self.sampling)
        others = time.process_time() - before[0] - (time.thread_time() - before[1])
        CLOCK.parts["environments"] += Cost(0.0, max(0.0, others))
        with CLOCK.part("rewards"):
            for group in report.groups:
                await self._reward(group)
        return report

    async def _reward(self, group: Group) -> None:
        await self.composer.apply_async(group)
        for trajectory in group.trajectories:
            trajectory.score = reward_is_success(trajectory, group.row)

    def _update(self, samples: list[Sample], ranks: int, folder: Path) -> UpdateResult:
        rank_group: Any = Ranks(ranks)
        update = Updater(self.config, Learners(rank_group, FLOPS), folder / "nonfinite_batch.jsonl").run(samples, 0)
        self.sent = rank_group.sent
        return update

    def _metrics(self, report: RolloutReport, advantages: Any, update: UpdateResult, folder: Path) -> None:
        row = {
            **signal_metrics(report.groups, advantages),
            **rollout_metrics(report),
            **staleness_metrics(report.groups, 0),
            **Throughput().metrics({"generate": 1.0, "update": 1.0}, report.groups, update.works),
            **update.report.metrics(),
        }
        log = MetricsLog(folder / "metrics.jsonl")
        log.log(1, row)
        log.close()


def measure(sizes: Sizes, tokenizer: str | None) -> dict[str, Any]:
    """Measure one step in this process."""
    load = [os.getloadavg()[0]]
    torch.set_num_threads(1)
    bench = Bench(sizes, tokenizer)
    CLOCK.parts.clear()
    with tempfile.TemporaryDirectory() as folder, settled():
        bench.run(Path(folder))
    return {
        "parts": {name: asdict(cost) for name, cost in CLOCK.parts.items()},
        "counts": bench.counts,
        "machine": {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
        "load_average": [*load, os.getloadavg()[0]],
    }


def rounds(sizes: Sizes, args: argparse.Namespace) -> dict[str, Any]:
    """Measure every checkout in every round, each in a process of its own. For each part of a step, the round with the
    least CPU time counts."""
    here = Path(__file__).parent.parent
    trees = {"now": here} | ({"against": args.against} if args.against else {})
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    for number in range(args.rounds):
        for name in trees if number % 2 == 0 else reversed(trees):
            found[name].append(_once(trees[name], sizes, args.tokenizer))
    return {
        "sizes": asdict(sizes),
        "rounds": found,
        "trees": {name: best_of(sizes, several) for name, several in found.items()},
        **{key: found["now"][0][key] for key in ("counts", "machine")},
        "load_average": [found["now"][0]["load_average"][0], found["now"][-1]["load_average"][1]],
    }


def _once(tree: Path, sizes: Sizes, tokenizer: str | None) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).resolve()), "--once"]
    for name, value in asdict(sizes).items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    command += ["--tokenizer", tokenizer] if tokenizer else []
    path = os.pathsep.join([str(tree.resolve()), str(Path(__file__).parent.resolve())])
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def best_of(sizes: Sizes, several: list[dict[str, Any]]) -> dict[str, Any]:
    parts = several[0]["parts"]
    least = {name: min((one["parts"][name] for one in several), key=lambda cost: cost["cpu_s"]) for name in parts}
    engine = least.pop(ENGINE)

    def sums(left_out: Sequence[str], written: float) -> dict[str, float]:
        shares = {name: written if name in WRITTEN else 1.0 for name in least if name not in (ONE, *left_out)}
        return {clock: sum(shares[name] * least[name][clock] for name in shares) for clock in ("wall_s", "cpu_s")}

    usual = 1 / TrainerConfig.save_trajectories_every
    totals = {
        EVERY: sums((), 1.0),
        USUAL: sums((), usual),
        AFTER: sums(SAMPLING, usual),
    }
    return {"parts": least, "engine": engine, "totals": totals, "shares": shares(sizes, totals)}


def shares(sizes: Sizes, totals: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Return the sums as shares of each published step: of its published seconds, and of the seconds of these tokens
    at its published rate."""
    sampled = sizes.prompts * sizes.group_size * sizes.turns * sizes.tokens
    found = []
    for anchor in ANCHORS:
        if anchor.seconds:
            costs = {name: cost["cpu_s"] * TOKENS / sampled for name, cost in totals.items()}
            found.append(_row(anchor.name, "as published", anchor.seconds, costs))
        if anchor.tokens_per_second:
            costs = {name: cost["cpu_s"] for name, cost in totals.items()}
            found.append(_row(anchor.name, "for these tokens", sampled / anchor.tokens_per_second, costs))
    return found


def _row(name: str, how: str, seconds: float, costs: dict[str, float]) -> dict[str, Any]:
    return {
        "step": name,
        "how": how,
        "seconds": seconds,
        "shares": {key: cost / seconds for key, cost in costs.items()},
    }


def table(result: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    sizes, on, counts, trees = result["sizes"], result["machine"], result["counts"], result["trees"]
    before, after = result["load_average"]
    now, other = trees["now"], trees.get("against")
    head = ["part", "CPU s", "wall s", *(["CPU s, the other", "wall s, the other", "ratio of CPU s"] if other else [])]
    lines = [
        f"{sizes['prompts']} prompts x {sizes['group_size']} rollouts x {sizes['turns']} turns x {sizes['tokens']} "
        f"sampled tokens: {counts['sampled']:,} sampled, {counts['context']:,} in {counts['samples']:,} samples; "
        f"micro-batches of {sizes['micro_batch_tokens']:,} tokens, packed",
        f"{on['cores']} cores, load average {before:.1f} to {after:.1f}; Python {on['python']}, torch {on['torch']}, "
        f"transformers {on['transformers']}, numpy {on['numpy']}",
        f"{counts['file_bytes'] / 2**20:,.0f} MiB of trajectories; {counts['sent_bytes'] / 2**20:,.0f} MiB to the "
        f"ranks, at most {counts['sent_bytes_most'] / 2**20:,.1f} MiB to one rank",
        "",
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
    ]
    for name in [*now["parts"], *now["totals"]]:
        mine = (now["parts"] | now["totals"])[name]
        line = f"| {name} | {mine['cpu_s']:.2f} | {mine['wall_s']:.2f} |"
        if other:
            theirs = (other["parts"] | other["totals"])[name]
            ratio = theirs["cpu_s"] / max(1e-9, mine["cpu_s"])
            line += f" {theirs['cpu_s']:.2f} | {theirs['wall_s']:.2f} | {ratio:.1f} |"
        lines.append(line)
    head = ["step of", "which", "s", *now["totals"]]
    lines += ["", f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in now["shares"]:
        cells = " | ".join(f"{share:.1%}" for share in row["shares"].values())
        lines.append(f"| {row['step']} | {row['how']} | {row['seconds']:.1f} | {cells} |")
    lines += ["", f"Shares are of CPU s; the target is {TARGET:.0%}."]
    return "\n".join(lines)


def parse(words: Sequence[str] | None = None) -> tuple[Sizes, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in asdict(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help="default %(default)s")
    parser.add_argument("--tokenizer", help="folder of a tokenizer with the chat format of Qwen3")
    parser.add_argument("--against", type=Path, help="another checkout of mtrl, which is measured too")
    parser.add_argument("--rounds", type=int, default=1, help="the fastest round counts (default %(default)s)")
    parser.add_argument("--once", action="store_true", help="measure one step in this process and print JSON")
    parser.add_argument("--json", type=Path, help="also write all results to this JSON file")
    args = parser.parse_args(words)
    sizes = Sizes(**{name: getattr(args, name) for name in asdict(Sizes())})
    least = {"seed": 0, "tokens": 50, "vocabulary": 300, "text_characters": 10_000, "group_size": 2}
    for name, value in (*asdict(sizes).items(), ("rounds", args.rounds)):
        if value < least.get(name, 1):
            parser.error(f"--{name.replace('_', '-')} must be at least {least.get(name, 1)}")
    if args.against is not None and not (args.against / "mtrl").is_dir():
        parser.error(f"--against {args.against} holds no mtrl")
    return sizes, args


def main() -> None:
    sizes, args = parse()
    if args.once:
        print(json.dumps(measure(sizes, args.tokenizer)))
        return
    result = rounds(sizes, args)
    print(table(result))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
