"""The stream: the bound holds while groups and updates overlap, errors are raised, and no task is left running."""

import asyncio
import threading
from collections import Counter
from itertools import count, pairwise

import pytest
from streams import FakeRollouts, Gated, Rows, family_of, ids, make, publish, rows_of, run, soon, train

from mtrl.config.schema import RewardConfig
from mtrl.errors import UserError
from mtrl.rewards.compose import RewardComposer
from mtrl.trainer.data.experience import Collector, NoSignalError, StoppedError
from mtrl.trainer.data.stream import Activity
from mtrl.types import StopReason

# -- the bound --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_stale", ["wait", "requeue"])
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_no_token_is_older_than_the_bound_and_no_prompt_is_repeated(lag, on_stale):
    stream = make(lag=lag, on_stale=on_stale, max_concurrent_groups=7)
    found = run(train(stream, 12))
    for step, experience in enumerate(found):
        ages = [step - t.oldest_version for group in experience.groups for t in group.trajectories]
        assert max(ages) <= lag
        assert experience.metrics()["async/age/max"] <= lag
        assert all(t.score == 1.0 for group in experience.groups for t in group.trajectories)
    assert max(Counter(rows_of(found)).values()) == 1
    assert stream.rollouts.most <= 7
    if on_stale == "wait" or not lag:
        assert sum(e.metrics()["async/requeued"] for e in found) == 0


def test_without_staleness_it_is_the_synchronous_collector():
    stream, collector = make(lag=0), make(Collector)
    assert ids(found := run(train(stream, 5))) == ids(expected := run(train(collector, 5)))
    assert rows_of(found) == rows_of(expected) == list(range(20))
    assert ids(found)[3] == ["step3/0", "step3/1", "step3/2", "step3/3"]


def test_groups_are_sampled_during_the_update():
    """With K = 2 two further batches are admitted and sampled before the first update ends."""

    async def learn():
        stream = make(lag=2)
        await stream.collect(0)
        while len(stream.finished) < 8:  # otherwise this loop would not end
            await asyncio.sleep(0)
        assert len(stream.rollouts.names) == 12  # no more groups before the weights are published
        publish(stream, 1)
        await asyncio.sleep(0)
        assert len(stream.rollouts.names) == 16
        await stream.close()

    run(learn())


@pytest.mark.parametrize("on_stale", ["wait", "requeue"])
def test_no_group_is_sampled_beyond_the_last_step(on_stale):
    async def learn():
        stream = make(lag=3, on_stale=on_stale)
        stream.admission.steps = 6
        found = await train(stream, 6, close=False)
        assert not stream.tasks and not stream.finished and not stream.admission.outstanding
        await stream.close()
        return found

    assert sorted(rows_of(run(learn()))) == list(range(24))


def test_a_straggler_is_overtaken_and_then_waited_for():
    async def learn():
        stream = make(rollouts=Gated(), batch=1, lag=1)
        stream.rollouts.open("step1/0")
        first = await stream.collect(0)
        assert ids([first]) == [["step1/0"]]
        assert first.metrics()["async/straggler_seconds"] == 0.0  # it waited, but there were not enough groups
        publish(stream, 1)
        stream.rollouts.open("step2/0")
        waiting = asyncio.create_task(stream.collect(1))
        await soon(lambda: len(stream.finished) == 1)
        assert not waiting.done()
        stream.rollouts.open("step0/0")
        found = await waiting
        assert ids([found]) == [["step0/0"]] and found.metrics()["async/ready"] == 1.0
        assert 0 < found.metrics()["async/straggler_seconds"] <= found.metrics()["async/wait_seconds"]
        await stream.close()

    run(learn())


def test_requeue_trains_without_the_straggler_and_repeats_its_prompt():
    async def learn():
        stream = make(rollouts=Gated(), batch=1, lag=1, on_stale="requeue")
        for step in range(3):
            stream.rollouts.open(f"step{step + 1}/0")
            assert ids([await stream.collect(step)]) == [[f"step{step + 1}/0"]]
            publish(stream, step + 1)
            await asyncio.sleep(0)
        names = stream.rollouts.names
        assert names[names.index("step0/0~") - 1] == "step2/0"  # first in the step after its deadline
        stream.rollouts.open("step0/0~")
        found = await stream.collect(3)
        assert rows_of([found]) == [0] and ids([found]) == [["step0/0~"]]
        await stream.close()

    run(learn())


def test_a_batch_is_in_the_order_of_admission():
    class FailsOnce(Gated):
        def make(self, group_id, row, size, version):
            group = super().make(group_id, row, size, version)
            if group_id == "step0/0":
                group.trajectories[0].stop_reason = StopReason.ENV_ERROR
            return group

    async def learn():
        stream = make(rollouts=FailsOnce(), batch=2, lag=1)
        stream.rollouts.open("step0/1", "step1/0")
        await stream.collect(0)
        publish(stream, 1)
        stream.rollouts.open("step0/0", "step0/0+", "step1/1")  # the replacement has a version more than the last one
        assert ids([await stream.collect(1)]) == [["step0/0+", "step1/1"]]
        await stream.close()

    run(learn())


def test_a_too_old_token_is_an_error():
    class Stale(FakeRollouts):
        def make(self, group_id, row, size, version):
            return super().make(group_id, row, size, version - (group_id == "step2/1"))

    with pytest.raises(RuntimeError, match=r"group step2/1 .*sampled 1 training steps ago.*max_steps_off_policy=0"):
        run(train(make(lag=0, rollouts=Stale()), 5))


# -- errors -----------------------------------------------------------------------------------------------------------


class Broken(FakeRollouts):
    async def play(self, group_id, row):
        await super().play(group_id, row)
        if row["n"] == 6:
            raise ZeroDivisionError("row 6")


def test_an_error_in_a_task_ends_the_waiting_collect():
    stream = make(rollouts=Broken(), batch=8, lag=0)
    with pytest.raises(ZeroDivisionError, match="row 6"):
        run(train(stream, 1))
    assert stream.rollouts.running == 0


def test_an_error_between_two_steps_is_raised_by_the_next_collect():
    class BrokenGate(Gated):
        async def play(self, group_id, row):
            await super().play(group_id, row)
            if row["n"] == 3:
                raise ZeroDivisionError("row 3")

    async def learn():
        stream = make(rollouts=BrokenGate(), batch=1, lag=3)
        stream.rollouts.open("step0/0")
        await stream.collect(0)
        stream.rollouts.open("step1/0", "step3/0")
        await soon(lambda: stream.error)
        publish(stream, 1)
        with pytest.raises(ZeroDivisionError, match="row 3"):
            await stream.collect(1)
        await stream.close()

    run(learn())


def test_an_error_of_the_scorer_is_raised():
    def score(trajectory, row):
        raise UserError("the scorer is ill")

    with pytest.raises(UserError, match="the scorer is ill"):
        run(train(make(family=family_of(score)), 1))


def test_a_component_that_is_never_reported_is_an_error():
    stream = make()
    stream.composer = RewardComposer(RewardConfig(components={"environment": 1.0, "formt": 1.0}))
    with pytest.raises(UserError, match="formt"):
        run(train(stream, 1))


def test_an_error_of_the_data_set_is_raised():
    class Few(Rows):
        def next(self):
            if self.drawn == 10:
                raise UserError("no row")
            return super().next()

    with pytest.raises(UserError, match="no row"):
        run(train(make(rows=Few()), 9))


def test_a_cancelled_group_is_an_error():
    class Cancelling(FakeRollouts):
        async def play(self, group_id, row):
            raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="group step0/0 were cancelled, and not by the trainer"):
        run(train(make(rollouts=Cancelling()), 1))


def test_a_missing_publish_is_an_error():
    async def learn():
        stream = make()
        await stream.collect(0)
        try:
            with pytest.raises(RuntimeError, match="publish"):
                await stream.collect(0)
        finally:
            await stream.close()

    run(learn())


class Failing(FakeRollouts):
    """Rollouts in which one of the two episodes of some groups fails."""

    def __init__(self, fails, **settings):
        super().__init__(**settings)
        self.fails = fails

    def make(self, group_id, row, size, version):
        group = super().make(group_id, row, size, version)
        if self.fails(row["n"]):
            group.trajectories[0].stop_reason = StopReason.ENV_ERROR
            group.trajectories[0].error = "ValueError: dry\nTraceback"
        return group


def test_failed_groups_are_replaced_as_a_whole_and_counted():
    stream = make(rollouts=Failing(lambda n: n % 4 == 1, max_failed_share=0.5), lag=1)
    found = run(train(stream, 6))
    assert all(n % 4 != 1 for n in rows_of(found))
    assert len(set(rows_of(found))) == 24
    failures = [t for e in found for t in e.report.failures]
    assert failures and sum(e.report.episodes for e in found) >= 2 * (24 + len(failures))
    replaced = [name for names in ids(found) for name in names if name.endswith("+")]
    assert replaced and set(replaced) <= {f"{t.group_id}+" for t in failures}


def test_too_many_failures_are_an_error_in_one_sentence():
    with pytest.raises(UserError, match=r"3 of 8 episodes failed, more than .*max_failed_share=0\.25.*ValueError: dry"):
        run(train(make(rollouts=Failing(lambda n: n >= 8, max_failed_share=0.25)), 9))


def test_endless_failures_are_an_error():
    with pytest.raises(UserError, match="none of the last 10 rounds of replacements had a group without a failure"):
        run(train(make(rollouts=Failing(lambda n: n >= 8)), 9))


def test_the_share_of_failures_is_checked_after_a_whole_step():
    class FirstFails(Failing):
        async def play(self, group_id, row):
            await asyncio.sleep(0.01 * row["n"])

    found = run(train(make(rollouts=FirstFails(lambda n: n == 0, max_failed_share=0.25)), 2))
    assert len(found[0].report.failures) == 1


# -- dynamic sampling -------------------------------------------------------------------------------------------------


class Silent(FakeRollouts):
    """Rollouts in which all episodes of some rows have the same reward."""

    def __init__(self, teaches):
        super().__init__()
        self.teaches = teaches

    def make(self, group_id, row, size, version):
        group = super().make(group_id, row, size, version)
        for trajectory in group.trajectories if not self.teaches(row["n"]) else ():
            trajectory.turns[-1].reward = 1.0
        return group


@pytest.mark.parametrize("lag", [0, 2])
def test_groups_without_an_advantage_are_set_aside_and_replaced(lag):
    stream = make(rollouts=Silent(lambda n: n % 3 == 0), lag=lag, algorithm={"dynamic_sampling_rounds": 9})
    found = run(train(stream, 6))
    assert all(n % 3 == 0 for n in rows_of(found)) and len(set(rows_of(found))) == 24
    aside = [group.row["n"] for e in found for group in e.set_aside]
    assert aside and all(n % 3 for n in aside)
    for experience in found:
        assert {g.group_id for g in experience.report.groups} == {
            g.group_id for g in [*experience.groups, *experience.set_aside]
        }


def test_the_bound_of_dynamic_sampling_raises_the_same_error():
    stream = make(rollouts=Silent(lambda n: n < 5), algorithm={"dynamic_sampling_rounds": 2})
    with pytest.raises(
        NoSignalError,
        match=r"algorithm\.dynamic_sampling_rounds=2 rounds of new prompts only 1 of \d+ groups had an "
        r"advantage, and a step needs trainer\.prompts_per_step=4",
    ):
        run(train(stream, 9))


@pytest.mark.parametrize("slow", [0, 1])
def test_groups_without_an_advantage_are_no_error_beside_enough_others(slow):
    """Either kind of group may be slower. With half of the groups without an advantage, one round is enough."""

    class Halves(Silent):
        async def play(self, group_id, row):
            await asyncio.sleep(0.03 if row["n"] % 2 == slow else 0)

    stream = make(rollouts=Halves(lambda n: n % 2 == 0), batch=2, lag=5, algorithm={"dynamic_sampling_rounds": 1})
    found = run(train(stream, 6))
    assert all(n % 2 == 0 for n in rows_of(found))
    assert max(len(experience.set_aside) for experience in found) > 2


def test_waiting_for_a_straggler_is_no_lack_of_signal():
    """During the wait other groups have no advantage, but a batch is ready."""

    class OneSlow(Silent, Gated):
        async def play(self, group_id, row):
            if row["n"] == 0:
                await super().play(group_id, row)

    async def learn():
        rollouts = OneSlow(lambda n: n < 5 or n > 20)
        stream = make(rollouts=rollouts, batch=2, lag=1, algorithm={"dynamic_sampling_rounds": 1})
        await stream.collect(0)
        publish(stream, 1)
        waiting = asyncio.create_task(stream.collect(1))
        await soon(lambda: len(stream.finished) == 3)
        rollouts.open("step0/0")
        found = await waiting
        assert rows_of([found]) == [0, 3] and len(found.set_aside) == 16
        await stream.close()

    run(learn())


# -- nothing is left --------------------------------------------------------------------------------------------------


def test_scoring_does_not_stop_the_episodes():
    """The scorer waits for an event of the event loop; on the loop itself it would wait forever."""
    happened = threading.Event()

    class Knocking(FakeRollouts):
        async def play(self, group_id, row):
            if row["n"] == 5:
                happened.set()
            await asyncio.sleep(0.01 * row["n"])

    family = family_of(lambda trajectory, row: float(happened.wait(10)))
    (experience,) = run(train(make(rollouts=Knocking(), family=family, batch=2, max_concurrent_groups=4, lag=3), 1))
    assert all(t.score == 1.0 for group in experience.groups for t in group.trajectories)


def test_groups_of_an_evaluation_are_scored_in_the_same_thread():
    """During an evaluation beside the stream, a user's scorer never runs in two threads at once."""
    threads = set()

    def score(trajectory, row):
        threads.add(threading.current_thread())
        return 1.0

    async def evaluate_beside():
        stream = make(family=family_of(score), batch=2)
        group = stream.rollouts.make("eval/0", {"n": 0}, 2, 0)
        await asyncio.gather(stream.collect(0), stream.reward_and_score([group]))
        await stream.close()
        return group

    group = run(evaluate_beside())
    assert all(t.score == 1.0 and t.trainable for t in group.trajectories)
    assert len(threads) == 1 and threading.main_thread() not in threads


def test_a_stop_ends_a_waiting_collect_and_loses_no_group():
    async def learn():
        stream = make(rollouts=Gated(), batch=2, lag=1)
        stream.rollouts.open("step0/1")
        collecting = asyncio.create_task(stream.collect(0))
        await soon(lambda: len(stream.finished) == 1)
        stream.stop()
        with pytest.raises(StoppedError):
            await asyncio.wait_for(collecting, 10)
        state = stream.state()
        assert [entry["group"]["group_id"] for entry in state[1:]] == ["step0/0", "step0/1", "step1/0", "step1/1"]
        assert [bool(entry["group"]["trajectories"]) for entry in state[1:]] == [False, True, False, False]
        await stream.close()

    run(learn())


@pytest.mark.parametrize("concurrent", [None, 5])
def test_close_in_the_middle_of_a_step_leaves_no_task(concurrent):
    class Tidying(Gated):
        async def play(self, group_id, row):
            try:
                await super().play(group_id, row)
            finally:
                await asyncio.sleep(0.01)

    async def learn():
        stream = make(rollouts=Tidying(), lag=3, max_concurrent_groups=concurrent)
        collecting = asyncio.create_task(stream.collect(0))
        await soon(lambda: stream.rollouts.running == (concurrent or 16))
        collecting.cancel()
        await stream.close()
        assert stream.rollouts.running == 0
        await stream.close()  # a second call has no effect

    run(learn())


def test_the_generator_is_busy_while_a_group_is_in_progress():
    spans = []
    stream = make(batch=2, lag=1)
    stream.activity = Activity(lambda start, end: spans.append((start, end)))
    run(train(stream, 5))
    assert len(spans) >= 5  # cut at every publish
    assert all(start <= end for start, end in spans)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_activity_reports_busy_intervals_and_counts_idle_time(monkeypatch):
    clock = count(10)
    monkeypatch.setattr("mtrl.trainer.data.stream.time.perf_counter", lambda: float(next(clock)))
    spans = []
    activity = Activity(lambda start, end: spans.append((start, end)))
    activity.note(False)  # 10
    activity.note(True)  # 11
    activity.note(True)
    activity.cut()  # 12
    activity.note(False)  # 13
    assert spans == [(11.0, 12.0), (12.0, 13.0)]
    assert activity.take_idle() == 2.0  # 10 to 11 and 13 to 14
    assert activity.take_idle() == 1.0
