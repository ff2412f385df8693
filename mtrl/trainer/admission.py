"""Admission: which prompts may start and which groups are trained next, so that nothing is trained too late."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from mtrl.types import Row


@dataclass(frozen=True, eq=False)
class Outstanding:
    """A group between its admission and its training."""

    number: int
    """Which admission it was, from 0; a replacement and a repetition keep the number of what they stand for."""
    group_id: str
    row: Row
    version: int
    """Training steps done when it was admitted: none of its tokens is sampled by older weights."""


class Admission:
    """Keeps the age of what is trained within `max_steps_off_policy` (K) training steps of `batch` (B) groups each.

    A group that is admitted at version v has the deadline v + K, the last version that may train it. Two rules hold:

    1. At most (K + 1) B groups are outstanding, those that are being trained included.
    2. B finished groups are trained only if all others can still meet their deadlines: of those others at most j B have
       deadlines up to j versions after the current one, for every j >= 0.

    Proof that nothing becomes too old, and nothing is dropped. Call a state feasible if no deadline is in the past and,
    for every j >= 0, at most (j + 1) B outstanding groups have deadlines up to version + j. No deadline is beyond
    version + K, so a new group counts only from j = K on, where rule 1 is the condition; a group that leaves, or is
    replaced by one with a later deadline, lowers the counts; and rule 2 at version v is feasibility at v + 1.

    Proof that it goes on, up to the last step. If fewer than B groups are outstanding, more may be admitted. Else, once
    all have finished, the B earliest deadlines satisfy rule 2: either they hold all deadlines up to version + j, or
    they are B of at most (j + 1) B. If any B finished groups satisfy it then so do those with the earliest deadlines,
    so it is exactly as lax as the bound allows: what is slow may be overtaken, until its deadline needs its place.
    """

    def __init__(
        self, batch: int, max_steps_off_policy: int, max_concurrent: int | None = None, steps: float = math.inf
    ):
        """`max_concurrent` bounds the groups that are played at once; None: rule 1 alone does. No more groups are
        admitted than `steps` training steps, those before a resumption included, can use."""
        self.batch, self.lag = batch, max_steps_off_policy
        self.limit = (max_steps_off_policy + 1) * batch
        self.max_concurrent = self.limit if max_concurrent is None else max_concurrent
        self.steps = steps
        self.version = 0
        """Training steps done."""
        self.admitted = 0
        """Prompts drawn so far, and the number of the next one."""
        self.outstanding: set[Outstanding] = set()
        """Admitted, and neither handed over for training nor gone."""
        self.training: list[Outstanding] = []
        """Handed over, but the weights that learnt from them are not out yet."""
        self.again: list[Outstanding] = []
        """What is admitted before any new prompt, by number: replacements and repetitions."""

    def begin(self, version: int) -> None:
        """Go on at this version. Numbers start where those of synchronous steps would, so that no name comes twice."""
        self.version = version
        self.admitted = max(self.admitted, version * self.batch)

    def counters(self) -> dict[str, int]:
        """What `count_from` goes on from."""
        return {"version": self.version, "admitted": self.admitted, "batch": self.batch}

    def count_from(self, version: int, admitted: int, batch: int) -> None:
        """Go on from the `counters` of a stopped run. Where its batches were of another size, numbers go on behind the
        last step that its names tell."""
        self.version = version
        self.admitted = admitted if batch == self.batch else max(admitted, -(-admitted // batch) * self.batch)

    def deadline(self, group: Outstanding) -> int:
        """The last version that may train it."""
        return group.version + self.lag

    def may_admit(self, running: int) -> bool:
        """Whether one more group may start while `running` are played."""
        places = min(self.limit, (self.steps - self.version) * self.batch)
        return running < self.max_concurrent and len(self.outstanding) + len(self.training) < places

    def admit(self, next_row: Callable[[], Row]) -> Outstanding:
        """The next group to play; it is on a new row unless one is to be played again."""
        if self.again:
            group = replace(self.again.pop(0), version=self.version)
        else:
            step, place = divmod(self.admitted, self.batch)
            group = Outstanding(self.admitted, f"step{step}/{place}", next_row(), self.version)
            self.admitted += 1
        self.outstanding.add(group)
        return group

    def choose(self, finished: Collection[Outstanding]) -> list[Outstanding] | None:
        """The B finished groups to train now; None while one that has not finished must be waited for."""
        if len(finished) < self.batch:
            return None
        chosen = sorted(finished, key=self._urgency)[: self.batch]
        rest = sorted(self.outstanding.difference(chosen), key=self._urgency)
        return None if self._late(rest, self.version + 1) else chosen

    def hand_over(self, groups: Collection[Outstanding]) -> None:
        """They are trained from now on; they count as outstanding until `trained`."""
        self.outstanding.difference_update(groups)
        self.training = list(groups)

    def trained(self, version: int) -> None:
        """The weights of `version` have learnt from what was handed over."""
        self.version, self.training = version, []

    def overdue(self, finished: Collection[Outstanding]) -> list[Outstanding]:
        """Outstanding groups that cannot make their deadlines any more, whatever is trained next.

        There are none as long as `choose` of this class decided. Of equal deadlines, finished ones keep their places.
        """
        order = sorted(self.outstanding, key=lambda g: (self.deadline(g), g not in finished, g.number))
        return self._late(order, self.version)

    def set_aside(self, group: Outstanding) -> None:
        """It teaches nothing and is not trained."""
        self.outstanding.remove(group)

    def failed(self, group: Outstanding, row: Row) -> None:
        """An episode of it failed for good: `row` is played in its place."""
        self.outstanding.remove(group)
        self.put_back(replace(group, group_id=f"{group.group_id}+", row=row))

    def requeue(self, group: Outstanding) -> None:
        """It became too old: its prompt is played again, under newer weights."""
        self.outstanding.remove(group)
        self.put_back(replace(group, group_id=f"{group.group_id}~"))

    def put_back(self, group: Outstanding) -> None:
        """Let it be admitted before any new prompt."""
        insort(self.again, group, key=lambda g: g.number)
        self.admitted = max(self.admitted, group.number + 1)

    def put_finished(self, group: Outstanding) -> None:
        """Count a group in that a stopped run had finished."""
        self.outstanding.add(group)
        self.admitted = max(self.admitted, group.number + 1)

    def _urgency(self, group: Outstanding) -> tuple[int, int]:
        return self.deadline(group), group.number

    def _late(self, order: Iterable[Outstanding], version: int) -> list[Outstanding]:
        """Those that miss their deadlines where, from `version` on, B a version are trained in this order."""
        late, timely = [], 0
        for group in order:
            if self.deadline(group) < version + timely // self.batch:
                late.append(group)
            else:
                timely += 1
        return late


class ImpatientAdmission(Admission):
    """`on_stale=requeue`: never waits for a straggler. What has become `overdue` after a step is played again, which
    favours prompts whose episodes are short."""

    def choose(self, finished: Collection[Outstanding]) -> list[Outstanding] | None:
        """The B finished groups with the earliest deadlines; None while there are fewer."""
        if len(finished) < self.batch:
            return None
        return sorted(finished, key=self._urgency)[: self.batch]
