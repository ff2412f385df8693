"""A training run in simulated time, with mtrl's own admission."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from clock import Clock
from hardware import NODE, Hardware
from interpreter import DESK, LOOP, Interpreter
from server import Asked, Server
from workload import Turn, Workload

from mtrl.trainer.data.admission import Outstanding
from mtrl.trainer.data.stream import ADMISSIONS


@dataclass(frozen=True)
class Plan:
    """A workload, a number of GPUs, and the settings of the run."""

    workload: Workload
    gpus: int
    lag: int
    """Value of `async_config.max_steps_off_policy`."""
    share: float = 0.5
    """Share of the GPUs that servers have without colocation."""
    colocated: bool = False
    """Whether servers and trainers alternate on all GPUs."""
    on_stale: str = "wait"
    has_workers: bool = False
    """Whether episodes run in rollout workers, one on each machine, instead of on rank 0."""
    most: int = 32
    """Greatest number of simulated GPUs. With more GPUs, an equal part of the servers and groups is simulated, and the
    work of rank 0 for each of them is multiplied: all servers behave alike and share rank 0."""

    @property
    def times(self) -> int:
        """Number of GPUs that each simulated GPU represents."""
        return max(1, self.gpus // self.most)

    @property
    def servers(self) -> int:
        gpus = self.gpus if self.colocated else self.gpus * self.share
        return max(1, int(gpus / self.workload.tensor_parallel))

    @property
    def workers(self) -> int:
        """Number of rollout workers."""
        return max(1, self.gpus // NODE) if self.has_workers else 0

    @property
    def trainers(self) -> int:
        return self.gpus if self.colocated else self.gpus - self.servers * self.workload.tensor_parallel


@dataclass(eq=False)
class Episode:
    """One running trajectory."""

    group: RunningGroup
    turns: list[Turn]
    home: Server
    """Server of its next turn."""
    done: int = 0
    """Number of finished turns."""
    context: int = 0
    """Number of tokens."""
    cached: int = 0
    """Number of tokens whose keys and values its server has, computed by the weights of `version`."""
    version: int = 0
    asked: Asked | None = None


@dataclass(eq=False)
class RunningGroup:
    """A group between its admission and its training."""

    slot: Outstanding
    interpreter: Interpreter
    """Interpreter of its episodes: that of rank 0 or of a rollout worker."""
    episodes: list[Episode] = field(default_factory=list)
    left: int = 0
    """Number of episodes that have not ended."""
    dropped: bool = False


@dataclass(frozen=True)
class Step:
    """Times and groups of one training step."""

    begun: float
    """Time at which the step before ended."""
    published: float
    """Time at which the servers had the new weights."""
    ended: float
    """Time at which the metrics of the step were written."""
    ages: list[int]
    """Ages of its groups in steps, by the version at their admission."""
    waited: float
    """Seconds of waiting for groups."""
    updated: float
    """Seconds of the update on the GPUs."""
    paused: float
    """Seconds in which servers were paused for new weights."""
    trained: list[int]
    """Numbers of its groups."""
    sampled: int
    """Number of sampled tokens."""
    context: int
    """Number of all tokens."""

    @property
    def seconds(self) -> float:
        return self.ended - self.begun


class Job:
    """`mtrl/trainer/loop.py` and `stream.py` with simulated work, whose seconds are those of `Hardware`."""

    def __init__(self, plan: Plan, hardware: Hardware, seed: int = 0, steps: float = float("inf")):
        self.plan, self.hardware, self.seed = plan, hardware, seed
        self.clock = Clock()
        self.leader = Interpreter(self.clock)
        self.workers = [Interpreter(self.clock) for _ in range(-(-plan.workers // plan.times))]
        self.servers = [Server(self.clock, hardware.speed(plan)) for _ in range(max(1, plan.servers // plan.times))]
        self.batch = plan.workload.groups(plan.gpus // plan.times)
        self.admission = ADMISSIONS[plan.on_stale](self.batch, plan.lag, None, steps)
        self.running: dict[Outstanding, RunningGroup] = {}
        self.finished: dict[Outstanding, RunningGroup] = {}
        self.steps: list[Step] = []
        self.spent: Counter[str] = Counter()
        """Seconds of rank 0 outside of its interpreter, by kind: networks, and copies in the memory of its host."""
        self.last: list[RunningGroup] = []
        """Groups of the newest batch."""
        self.requeued = 0
        self._rows = count()
        self._homes = 0
        self._learning = False
        self._begun, self._free = 0.0, 0.0

    def run(self, steps: int) -> list[Step]:
        """Continue until `steps` steps are trained."""
        if not self.admission.admitted:
            self.admission.begin(0)
            self._admit()
        self.clock.run(lambda: len(self.steps) >= steps)
        for interpreter in (self.leader, *self.workers):
            interpreter.settle()
        return self.steps

    @property
    def busy_workers(self) -> float:
        """Seconds in which the interpreter of a rollout worker was busy, as the mean over workers."""
        return sum(sum(worker.spent.values()) for worker in self.workers) / max(1, len(self.workers))

    # -- rollouts, as in `Stream` -----------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self.admission.may_admit(len(self.running)):
            self._start(self.admission.admit(lambda: {"n": next(self._rows)}))

    def _start(self, slot: Outstanding) -> None:
        """Start the episodes of a group on one server, since they share a prompt (`Router`), and in the rollout worker
        with the fewest groups (`Workers`)."""
        groups = Counter(group.interpreter for group in self.running.values())
        interpreter = min(self.workers, key=lambda worker: groups[worker], default=self.leader)
        group = self.running[slot] = RunningGroup(slot, interpreter)
        self._homes += 1
        home = self.servers[self._homes % len(self.servers)]
        workload = self.plan.workload
        for index in range(workload.group_size):
            turns = workload.episode(self.seed, slot.row["n"], index)
            group.episodes.append(Episode(group, turns, home))
        group.left = len(group.episodes)
        for episode in group.episodes:
            self._ask(episode)

    def _ask(self, episode: Episode) -> None:
        """Request the next turn of an episode. Keys and values of older weights are computed again."""
        if episode.group.dropped:
            return
        turn = episode.turns[episode.done]
        if episode.version != self.admission.version:
            episode.version, episode.cached = self.admission.version, 0
        episode.context += turn.observed
        least = min(self.servers, key=lambda server: server.load) if self._is_crowded(episode.home) else episode.home
        if least is not episode.home:
            episode.home, episode.cached = least, 0
        over = partial(self._sampled, episode)
        episode.asked = Asked(episode.context - episode.cached, episode.context, turn.sampled, over)
        episode.home.ask(episode.asked)

    def _is_crowded(self, server: Server) -> bool:
        """Whether a turn moves to another server because too many turns are at this one, as by `Router.slack`."""
        slots = server.speed.slots
        return server.load >= max(8, slots // 4) and server.load >= slots

    def _sampled(self, episode: Episode) -> None:
        turn = episode.turns[episode.done]
        seconds = self.hardware.turn(self.plan, episode.context, turn.sampled)
        episode.context += turn.sampled
        episode.cached = episode.context
        episode.asked = None
        answered = partial(self.clock.after, turn.tool_seconds, partial(self._observed, episode))
        episode.group.interpreter.do(LOOP, "turns", seconds, answered)

    def _observed(self, episode: Episode) -> None:
        """Continue after the answer of the environment, or end the episode."""
        if episode.group.dropped:
            return
        episode.done += 1
        if episode.done < len(episode.turns):
            self._ask(episode)
            return
        group = episode.group
        group.left -= 1
        if not group.left:
            self.leader.do(LOOP, "answers", self.hardware.answer(self.plan, group), partial(self._finish, group))

    def _finish(self, group: RunningGroup) -> None:
        if group.dropped:
            return
        del self.running[group.slot]
        self.finished[group.slot] = group
        self._admit()
        if not self._learning and len(self.finished) >= self.batch:  # `Stream.collect` waits, and chooses again
            looking = self.hardware.choosing(self.plan, len(self.admission.outstanding))
            self.leader.do(LOOP, "choosing", looking, self._collect)

    def _drop(self, slot: Outstanding) -> None:
        """Drop a group that became too old, with `on_stale=requeue`."""
        self.requeued += 1
        self.admission.requeue(slot)
        self.finished.pop(slot, None)
        if (group := self.running.pop(slot, None)) is not None:
            group.dropped = True
            for episode in group.episodes:
                if episode.asked is not None:
                    episode.home.drop(episode.asked)

    # -- a step, as in `Trainer._step` --------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Begin the update if a batch is complete."""
        if self._learning or len(self.finished) < self.batch:
            return
        if (batch := self.admission.choose(self.finished)) is None:
            return
        self._learning = True
        self.admission.hand_over(batch)
        self.last = groups = [self.finished.pop(slot) for slot in sorted(batch, key=lambda slot: slot.number)]
        waited = self.clock.now - self._free
        load = self.hardware.load(self.plan, [e for group in groups for e in group.episodes])
        step = partial(self._ended, groups, waited, load.update, load.sampled, load.tokens)
        self._chain(
            (
                partial(self.leader.do, DESK, "credit", load.credit),
                partial(self.leader.do, DESK, "hand-out", load.handout_cpu),
                partial(self._pass, "hand-out, network", load.handout_network),
                partial(self.clock.after, load.update),
                partial(self._pass, "weights, host", self.hardware.sync_before(self.plan)),
                self._pause,
                partial(self.leader.do, LOOP, "weights, calls", self.hardware.sync_calls(self.plan)),
                partial(self._pass, "weights, host", self.hardware.sync_host(self.plan)),
                partial(self._pass, "weights, network", self.hardware.sync_network(self.plan)),
            ),
            step,
        )

    def _chain(self, parts: tuple[Callable[[Callable[[], None]], None], ...], last: Callable[[], None]) -> None:
        """Run the parts one after the other, and then `last`."""
        if parts:
            parts[0](lambda: self._chain(parts[1:], last))
        else:
            last()

    def _pass(self, kind: str, seconds: float, then: Callable[[], None]) -> None:
        self.spent[kind] += seconds
        self.clock.after(seconds, then)

    def _pause(self, then: Callable[[], None]) -> None:
        self._paused = self.clock.now
        for server in self.servers:
            server.pause()
        then()

    def _ended(self, groups: list[RunningGroup], waited: float, updated: float, sampled: int, context: int) -> None:
        """Continue after the weights were sent: as `Stream.publish`, and with the metrics of the step."""
        version = self.admission.version + 1
        ages = [self.admission.version - group.slot.version for group in groups]
        self.admission.trained(version)
        for server in self.servers:
            server.resume()
        for slot in self.admission.overdue(self.finished):
            self._drop(slot)
        published, paused = self.clock.now, self.clock.now - self._paused
        self._admit()

        def reported() -> None:
            numbers = [group.slot.number for group in groups]
            self.steps.append(
                Step(self._begun, published, self.clock.now, ages, waited, updated, paused, numbers, sampled, context)
            )
            self._begun = self._free = self.clock.now
            self._learning = False
            self._collect()

        self.leader.do(LOOP, "telling", self.hardware.reporting(self.plan, groups), reported)
