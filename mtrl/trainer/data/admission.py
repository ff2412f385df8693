"""Admission: selection of the prompts that may start and of the groups that are trained next, within a bound on
staleness."""

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
    """Number of the admission, from 0; a replacement and a repetition keep the number of the original group."""
    group_id: str
    row: Row
    version: int
    """Number of training steps done at the admission: no older weights sample a token of the group."""


class Admission:
    """Bounds the staleness of trained groups to `max_steps_off_policy` (K) training steps of `batch` (B) groups each.

    A group that is admitted at version v has the deadline v + K, the last version that may train it. Two rules hold:

    1. No more than (K + 1) B groups are outstanding, including those that are being trained.
    2. B finished groups are trained only if all others can still meet their deadlines: of those others at most j B have
       deadlines up to j versions after the current one, for every j >= 0.

    Proof that no group becomes too old, and none is dropped. Call a state feasible if no deadline is in the past and,
    for every j >= 0, at most (j + 1) B outstanding groups have deadlines up to version + j. No deadline is beyond
    version + K, so a new group counts only from j = K on, where rule 1 is the condition; a group that leaves, or is
    replaced by one with a later deadline, lowers the counts; and rule 2 at version v is feasibility at v + 1.

    Proof that training continues up to the last step. If fewer than B groups are outstanding, more may be admitted.
    Else, once all have finished, the B earliest deadlines satisfy rule 2: either they include all deadlines up to
    version + j, or they are B of at most (j + 1) B. If any B finished groups satisfy rule 2, then so do those with the
    earliest deadlines, so the rule is exactly as permissive as the bound allows: a slow group may be overtaken until
    its deadline requires its place.
    """

    def __init__(
        self, batch: int, max_steps_off_policy: int, max_concurrent: int | None = None, steps: float = math.inf
    ):
        """`max_concurrent` limits the groups whose episodes run at once; None: only rule 1 does. `steps` is the total
        number of training steps, including those before a resumption; no more groups are admitted than these steps can
        use."""
        self.batch, self.lag = batch, max_steps_off_policy
        self.limit = (max_steps_off_policy + 1) * batch
        self.max_concurrent = self.limit if max_concurrent is None else max_concurrent
        self.steps = steps
        self.version = 0
        """Number of training steps done."""
        self.admitted = 0
        """Number of prompts drawn so far, which is also the number of the next admission."""
        self.outstanding: set[Outstanding] = set()
        """Groups that were admitted and not yet handed over for training, replaced or set aside."""
        self.training: list[Outstanding] = []
        """Groups that were handed over for training and whose update is not published yet."""
        self.again: list[Outstanding] = []
        """Replacements and repetitions, by number; they are admitted before any new prompt."""

    def begin(self, version: int) -> None:
        """Start at this version. Numbers start where those of synchronous steps would, so that group names are
        unique."""
        self.version = version
        self.admitted = max(self.admitted, version * self.batch)

    def counters(self) -> dict[str, int]:
        """Return the state for `count_from`."""
        return {"version": self.version, "admitted": self.admitted, "batch": self.batch}

    def count_from(self, version: int, admitted: int, batch: int) -> None:
        """Continue from the `counters` of a stopped run. If its batch size was different, numbers continue after the
        last step that occurs in its group names."""
        self.version = version
        self.admitted = admitted if batch == self.batch else max(admitted, -(-admitted // batch) * self.batch)

    def deadline(self, group: Outstanding) -> int:
        """Return the last version that may train the group."""
        return group.version + self.lag

    def may_admit(self, running: int) -> bool:
        """Return whether one more group may start while the episodes of `running` groups are in progress."""
        capacity = min(self.limit, (self.steps - self.version) * self.batch)
        return running < self.max_concurrent and len(self.outstanding) + len(self.training) < capacity

    def admit(self, next_row: Callable[[], Row]) -> Outstanding:
        """Admit and return the next group: the first entry of `again`, else a group on a new row."""
        if self.again:
            group = replace(self.again.pop(0), version=self.version)
        else:
            step, index = divmod(self.admitted, self.batch)
            group = Outstanding(self.admitted, f"step{step}/{index}", next_row(), self.version)
            self.admitted += 1
        self.outstanding.add(group)
        return group

    def choose(self, finished: Collection[Outstanding]) -> list[Outstanding] | None:
        """Return the B finished groups to train now; None if training must wait for an unfinished group."""
        if len(finished) < self.batch:
            return None
        chosen = sorted(finished, key=self._urgency)[: self.batch]
        rest = sorted(self.outstanding.difference(chosen), key=self._urgency)
        return None if self._late(rest, self.version + 1) else chosen

    def hand_over(self, groups: Collection[Outstanding]) -> None:
        """Mark groups as being trained; they count as outstanding in rule 1 until `trained` is called."""
        self.outstanding.difference_update(groups)
        self.training = list(groups)

    def take_back(self) -> list[Outstanding]:
        """Mark the groups that were handed over as not trained. Return them in the order in which they were handed
        over."""
        groups, self.training = self.training, []
        self.outstanding.update(groups)
        return groups

    def trained(self, version: int) -> None:
        """Record that the groups that were handed over have been trained, which gave the weights of `version`."""
        self.version, self.training = version, []

    def overdue(self, finished: Collection[Outstanding]) -> list[Outstanding]:
        """Return the outstanding groups that cannot meet their deadlines any more, in any order of training.

        There are none if `choose` of this class selected all batches. Finished groups come before others with the same
        deadline.
        """
        order = sorted(self.outstanding, key=lambda g: (self.deadline(g), g not in finished, g.number))
        return self._late(order, self.version)

    def set_aside(self, group: Outstanding) -> None:
        """Remove a group that has no advantage and is not trained."""
        self.outstanding.remove(group)

    def failed(self, group: Outstanding, row: Row) -> None:
        """Replace a group of which an episode failed after all retries, by a group on `row`."""
        self.outstanding.remove(group)
        self.put_back(replace(group, group_id=f"{group.group_id}+", row=row))

    def requeue(self, group: Outstanding) -> None:
        """Repeat the prompt of a group that became too old, with newer weights."""
        self.outstanding.remove(group)
        self.put_back(replace(group, group_id=f"{group.group_id}~"))

    def put_back(self, group: Outstanding) -> None:
        """Queue a group to be admitted before any new prompt."""
        insort(self.again, group, key=lambda g: g.number)
        self.admitted = max(self.admitted, group.number + 1)

    def put_finished(self, group: Outstanding) -> None:
        """Add a group that a stopped run had finished."""
        self.outstanding.add(group)
        self.admitted = max(self.admitted, group.number + 1)

    def _urgency(self, group: Outstanding) -> tuple[int, int]:
        return self.deadline(group), group.number

    def _late(self, order: Iterable[Outstanding], version: int) -> list[Outstanding]:
        """Return the groups that miss their deadlines if, from `version` on, B groups per version are trained in this
        order."""
        late, timely = [], 0
        for group in order:
            if self.deadline(group) < version + timely // self.batch:
                late.append(group)
            else:
                timely += 1
        return late


class RequeueAdmission(Admission):
    """`on_stale=requeue`: never waits for a slow group. Groups that are `overdue` after a step are sampled again, which
    favours prompts with short episodes."""

    def choose(self, finished: Collection[Outstanding]) -> list[Outstanding] | None:
        """Return the B finished groups with the earliest deadlines; None while there are fewer."""
        if len(finished) < self.batch:
            return None
        return sorted(finished, key=self._urgency)[: self.batch]
