"""Admission: no group is trained too late, lost or repeated for any durations, and training always continues."""

import heapq
import random
from dataclasses import dataclass, field
from itertools import combinations, count
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrl.trainer.data.admission import Admission, Outstanding, RequeueAdmission

POLICIES = [Admission, RequeueAdmission]


@dataclass
class Play:
    """A simulated run of the admission alone, with a queue of events: ends of episodes and ends of updates."""

    admission: Admission
    seconds: object
    """`seconds(group)`: duration of its episodes."""
    update: object = lambda: 1.0
    fate: object = lambda: "ok"
    """Outcome of a finished group: ok, failed or silent (no advantage)."""
    now: float = 0.0
    events: list = field(default_factory=list)
    running: dict = field(default_factory=dict)
    finished: set = field(default_factory=set)
    trained: list = field(default_factory=list)
    """`(version, groups)` of each step."""
    silent: list = field(default_factory=list)
    failures: int = 0
    requeued: int = 0

    def __post_init__(self):
        self.rows, self.order = count(), count()
        self.drawn = []

    def next_row(self):
        self.drawn.append(next(self.rows))
        return {"id": self.drawn[-1]}

    def run(self, steps):
        while len(self.trained) < steps or self.admission.training:
            self.admit()
            self.train()
            assert self.events, "nothing can happen any more"
            self.now, _, what, group = heapq.heappop(self.events)
            if what == "update":
                self.publish()
            elif self.running.pop(group, None):
                self.end(group)
            self.check()
        return self

    def later(self, seconds, what, group=None):
        heapq.heappush(self.events, (self.now + seconds, next(self.order), what, group))

    def admit(self):
        while self.admission.may_admit(len(self.running)):
            group = self.admission.admit(self.next_row)
            self.running[group] = True
            self.later(self.seconds(group), "end", group)

    def train(self):
        batch = None if self.admission.training else self.admission.choose(self.finished)
        if batch is None:
            return
        assert len(batch) == self.admission.batch and self.finished.issuperset(batch)
        for group in batch:
            assert 0 <= self.admission.version - group.version <= self.admission.lag
        self.finished.difference_update(batch)
        self.admission.hand_over(batch)
        self.trained.append((self.admission.version, batch))
        self.later(self.update(), "update")

    def publish(self):
        self.admission.trained(self.admission.version + 1)
        for group in self.admission.overdue(self.finished):
            self.admission.requeue(group)
            self.running.pop(group, None)
            self.finished.discard(group)
            self.requeued += 1

    def end(self, group):
        fate = self.fate()
        if fate == "failed":
            self.failures += 1
            self.admission.failed(group, self.next_row())
        elif fate == "silent":
            self.admission.set_aside(group)
            self.silent.append(group)
        else:
            self.finished.add(group)

    def check(self):
        admission = self.admission
        assert len(admission.outstanding) + len(admission.training) <= admission.limit
        assert len(self.running) <= admission.max_concurrent
        assert admission.outstanding == self.finished | set(self.running)
        everyone = [group for _, batch in self.trained for group in batch]
        everyone += [*self.silent, *admission.outstanding, *admission.again]
        assert sorted(group.number for group in everyone) == list(range(admission.admitted))
        rows = [group.row["id"] for group in everyone]
        assert len(set(rows)) == len(rows) and len(rows) == len(self.drawn) - self.failures


def slow_and_fast(seed):
    """Durations: most groups take about a second, some take up to a hundred."""
    return lambda group: random.Random(f"{seed}/{group.group_id}").paretovariate(0.8)


@given(
    policy=st.sampled_from(POLICIES),
    batch=st.integers(1, 5),
    lag=st.integers(0, 4),
    concurrent=st.none() | st.integers(1, 8),
    update=st.sampled_from([0.01, 1.0, 20.0]),
    fates=st.sampled_from([(1, 0, 0), (8, 1, 1), (1, 1, 1)]),
    seed=st.integers(0, 10**6),
)
def test_admission_bounds_staleness_for_any_events(policy, batch, lag, concurrent, update, fates, seed):
    """`Play` asserts the bound on ages, that no group is lost or repeated, that there is no deadlock, and the limits on
    admission."""
    rng = random.Random(seed)
    play = Play(
        policy(batch, lag, concurrent),
        slow_and_fast(seed),
        lambda: update * rng.random(),
        lambda: rng.choices(["ok", "failed", "silent"], fates)[0],
    ).run(12)
    assert [version for version, _ in play.trained] == list(range(12))
    assert play.requeued == 0 or policy is RequeueAdmission
    names = [group.group_id for _, groups in play.trained for group in groups]
    assert len(set(names)) == len(names)  # so each group has other random numbers


@given(st.data())
def test_admission_waits_only_if_the_bound_requires_it(data):
    """Admission waits exactly if training any B finished groups would make another group too late."""
    batch, lag = data.draw(st.integers(1, 2)), data.draw(st.integers(0, 3))
    admission = Admission(batch, lag)
    admission.version = lag
    versions = data.draw(st.lists(st.integers(0, lag), max_size=min(7, admission.limit)))
    groups = [Outstanding(n, "g", {}, version) for n, version in enumerate(versions)]
    admission.outstanding = set(groups)
    finished = data.draw(st.sets(st.sampled_from(groups))) if groups else set()

    def in_time(rest):
        """Return whether all of them can still be trained in some order, B per version, from the next version on."""
        order = sorted(admission.deadline(group) for group in rest)
        return all(lag + 1 + place // batch <= deadline for place, deadline in enumerate(order))

    possible = any(in_time(admission.outstanding.difference(batch)) for batch in combinations(finished, batch))
    chosen = admission.choose(finished)
    assert (chosen is not None) == possible
    assert chosen is None or in_time(admission.outstanding.difference(chosen))


def is_long(group):
    return random.Random(group.group_id).random() < 0.5


def run_of(policy, concurrent=None, steps=300):
    """Half of the groups take twenty times as long as the rest; a repeated group may be of the other kind."""
    play = Play(policy(4, 2, concurrent), lambda group: 20.0 if is_long(group) else 1.0).run(steps)
    return play, [group for _, batch in play.trained for group in batch]


@pytest.mark.parametrize("concurrent", [None, 5])
def test_with_wait_all_drawn_groups_are_trained(concurrent):
    play, trained = run_of(Admission, concurrent)
    newest = {group.number for group in play.admission.outstanding}
    assert len(newest) <= play.admission.limit
    assert all(play.admission.deadline(group) >= play.admission.version for group in play.admission.outstanding)
    assert sorted(group.number for group in trained) == sorted(set(range(play.admission.admitted)) - newest)
    drawn = fmean(map(is_long, [*trained, *play.admission.outstanding]))
    assert fmean(map(is_long, trained)) == pytest.approx(drawn, abs=len(newest) / len(trained))


def test_requeue_trains_short_episodes_more_often():
    """`wait` does not have this bias, so it is the default."""
    _, patient = run_of(Admission)
    play, trained = run_of(RequeueAdmission)
    assert play.requeued > 100
    assert fmean(map(is_long, patient)) > 0.45
    assert fmean(map(is_long, trained)) < 0.4


def names(groups):
    return [group.group_id for group in groups]


def test_worked_example():
    """With B = 2 and K = 1, a straggler is overtaken once, and then waited for."""
    admission = Admission(2, 1)
    rows = iter({"id": n} for n in count())

    def admit():
        started = []
        while admission.may_admit(len(admission.outstanding)):
            started.append(admission.admit(lambda: next(rows)))
        return started

    a, b, c, d = admit()
    assert names([a, b, c, d]) == ["step0/0", "step0/1", "step1/0", "step1/1"]
    assert admission.choose([b]) is None
    assert admission.choose([b, d]) == [b, d]  # the deadline of a and c is version 1
    admission.hand_over([b, d])
    assert not admit()  # groups that are being trained are outstanding
    admission.trained(1)
    e, f = admit()
    assert names([e, f]) == ["step2/0", "step2/1"] and (e.version, admission.deadline(e)) == (1, 2)
    assert admission.choose([e, f]) is None and admission.choose([c, e, f]) is None  # a must be trained now
    assert admission.choose([a, c, e, f]) == [a, c]


def test_requeue_repeats_the_prompt_first_under_another_name():
    admission = RequeueAdmission(1, 1)
    rows = iter({"id": n} for n in count())
    a, b = (admission.admit(lambda: next(rows)) for _ in range(2))
    for version, group in ((1, b), (2, None)):
        group = group or admission.admit(lambda: next(rows))
        assert admission.choose([group]) == [group]
        admission.hand_over([group])
        admission.trained(version)
    assert admission.overdue([]) == [a]
    admission.requeue(a)
    again = admission.admit(lambda: next(rows))
    assert (again.group_id, again.row, again.number, again.version) == ("step0/0~", a.row, 0, 2)


def test_a_failed_group_is_replaced_at_its_place():
    admission = Admission(2, 0)
    rows = iter({"id": n} for n in count())
    a, b = (admission.admit(lambda: next(rows)) for _ in range(2))
    assert not admission.may_admit(0)
    admission.failed(a, next(rows))
    assert admission.may_admit(1)
    c = admission.admit(lambda: next(rows))
    assert (c.group_id, c.number, c.row["id"]) == ("step0/0+", 0, 2)
    assert set(admission.choose([b, c])) == {b, c}


def test_finished_groups_are_requeued_last():
    admission = RequeueAdmission(1, 2)
    admission.version = 2
    running, finished = (Outstanding(n, "g", {}, version=0) for n in range(2))
    admission.outstanding = {running, finished}
    assert admission.overdue({finished}) == [running]
    assert admission.overdue({running, finished}) == [finished]  # the older group is trained instead


def test_repeated_groups_are_admitted_in_the_order_of_their_numbers():
    admission = Admission(8, 0)
    for number in (5, 2, 3):
        admission.put_back(Outstanding(number, f"g{number}", {}, version=0))
    assert names(admission.admit(dict) for _ in range(4)) == ["g2", "g3", "g5", "step0/6"]
