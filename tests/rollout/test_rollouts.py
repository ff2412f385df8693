"""Groups of episodes: complete or replaced, and one sentence of an error if too many fail."""

import asyncio
from itertools import count

import pytest

from mtrl.errors import UserError
from mtrl.rollout.failures import MAX_FAILED_ROUNDS
from mtrl.rollout.rollouts import Rollouts, stream_seed
from mtrl.types import StopReason


def rows(*names):
    return [{"id": n, "prompt": [{"role": "user", "content": n}], "ground_truth": {"name": n}} for n in names]


@pytest.fixture
def collect(make_loop, counting, sampling):
    """Function `collect(step, names, …)` that returns a report; `step(env, truth)` decides on each episode."""

    def collect(step, names, size=2, replacements=None, max_failed_share=1.0, seen=None):
        environment = type("Env", (counting,), {"step": lambda self, response, truth: step(self, truth["name"])})
        waiting = iter(replacements or ())
        episodes = [] if seen is None else seen
        rollouts = Rollouts(make_loop(environment), 0, max_failed_share, episodes.append)
        replace = None if replacements is None else lambda: rows(next(waiting))[0]
        return asyncio.run(asyncio.wait_for(rollouts.collect("s", rows(*names), size, sampling, replace), 60))

    return collect


def healthy(environment, name):
    return 1.0, None, True


def dry(environment, name):
    if name.startswith("bad"):
        raise ValueError(f"{name} is dry")
    return 1.0, None, True


def second_is_dry():
    """Return a step that fails every second time on a bad row, so that no group fails as a whole."""
    steps = count(1)

    def step(environment, name):
        if name.startswith("bad") and next(steps) % 2 == 0:
            raise ValueError("dry")
        return 1.0, None, True

    return step


def test_one_group_per_row_in_order(collect):
    seen = []
    report = collect(healthy, ["x", "y", "z"], size=4, seen=seen)
    assert [group.row["id"] for group in report.groups] == ["x", "y", "z"]
    assert [[t.index for t in group.trajectories] for group in report.groups] == [[0, 1, 2, 3]] * 3
    assert {t.group_id for group in report.groups for t in group.trajectories} == {"s/0", "s/1", "s/2"}
    assert (report.episodes, report.failures, len(seen)) == (12, [], 12)


def test_a_group_with_a_failure_is_replaced_as_a_whole(collect, counting):
    report = collect(second_is_dry(), ["x", "bad"], replacements=["good", "unused"])
    assert [group.row["id"] for group in report.groups] == ["x", "good"]
    assert all(len(group.trajectories) == 2 for group in report.groups)
    assert all(t.stop_reason == StopReason.DONE for group in report.groups for t in group.trajectories)
    assert report.episodes == 6 and len(report.failures) == 1 and report.failures[0].task_id == "bad"
    assert all(environment.closed == 1 for environment in counting.made)


def test_failed_replacements_are_replaced(collect):
    report = collect(dry, ["bad", "x"], replacements=["bad2", "bad3", "good"])
    assert [group.row["id"] for group in report.groups] == ["x", "good"]
    assert len(report.failures) == 6 and report.episodes == 10
    ids = [group.group_id for group in report.groups]
    assert len(set(ids)) == 2


def test_evaluation_keeps_its_failures(collect):
    report = collect(dry, ["bad", "x"])
    assert [group.row["id"] for group in report.groups] == ["bad", "x"]
    assert [t.stop_reason for t in report.groups[0].trajectories] == [StopReason.ENV_ERROR] * 2
    assert not any(t.trainable for t in report.groups[0].trajectories) and len(report.failures) == 2


def test_too_many_failures_end_the_run(collect):
    with pytest.raises(UserError) as caught:
        collect(dry, ["bad", "x", "y"], replacements=["z"], max_failed_share=0.3)
    assert str(caught.value) == (
        "2 of 6 episodes failed, more than environment.max_failed_share=0.3 allows; the last failure was: "
        "ValueError: bad is dry (its traceback is in run.log)"
    )


def test_the_allowed_share_of_failures_does_not_end_the_run(collect):
    report = collect(dry, ["bad", "x", "y"], replacements=["z"], max_failed_share=2 / 6)
    assert len(report.groups) == 3


def test_the_error_names_a_hanging_environment(make_loop, counting, sampling):
    import threading

    free = threading.Event()
    environment = type("Env", (counting,), {"step": lambda *_: free.wait()})
    rollouts = Rollouts(make_loop(environment, step_timeout=0.05), 0, 0.0)
    with pytest.raises(UserError, match="CallTimeoutError: .* took longer than environment.step_timeout=0.05 s"):
        asyncio.run(rollouts.collect("s", rows("x"), 1, sampling))
    free.set()


def test_replacement_rounds_are_limited(collect):
    """If all episodes fail, the rollouts end for every allowed share."""
    supply = (f"bad{i}" for i in range(10_000))
    with pytest.raises(UserError, match=f"none of the last {MAX_FAILED_ROUNDS} rounds .* ValueError: bad.* is dry"):
        collect(dry, ["bad", "bad"], replacements=supply, max_failed_share=1.0)


def test_failures_are_warned_of_once_per_round(collect, caplog):
    collect(dry, ["bad", "x"], replacements=["good"])
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["2 of 4 episodes failed: ValueError: bad is dry"]


def test_streams_differ_by_seed_group_and_index():
    seeds = {stream_seed(seed, group, index) for seed in (0, 1) for group in ("step1/0", "step1/1") for index in (0, 1)}
    assert len(seeds) == 8 and all(0 <= seed < 2**64 for seed in seeds)
    assert stream_seed(0, "step1/0", 0) == 3894677479460149027, "or resumed runs sample something else"


def test_groups_are_reproducible_with_a_model(make_loop, counting, sampling, tiny_model, tiny_tokenizer):
    """There is a model, there are fewer slots than episodes, and threads finish in any order."""
    from mtrl.engines.local.engine import LocalEngine

    def sample_turns():
        engine = LocalEngine(tiny_model, tiny_tokenizer, 3, 200)
        report = asyncio.run(
            Rollouts(make_loop(counting, engine=engine), 0, 0.0).collect("s", rows("x", "y"), 4, sampling)
        )
        turns = [turn for group in report.groups for t in group.trajectories for turn in t.turns]
        return [(turn.observation_ids, turn.action_ids, turn.action_logprobs) for turn in turns]

    assert sample_turns() == sample_turns()


def test_an_error_leaves_no_episode_running(make_loop, counting, sampling):
    """An error of the run, or its cancellation, stops the other episodes, and their environments are closed."""

    class Endless(counting):
        async def step(self, response, truth):
            if truth["name"] == "x":
                return 1.0, None, True
            await asyncio.Event().wait()

    def refuse(trajectory):
        raise ZeroDivisionError

    async def sample_turns():
        loop = make_loop(Endless, step_timeout=1000, episode_timeout=1000)
        async with asyncio.timeout(20):
            with pytest.raises(ZeroDivisionError):
                await Rollouts(loop, 0, 0.0, refuse).collect("s", rows("x", "y", "z"), 2, sampling)
        async with asyncio.timeout(20):  # one that was being made or closed just then is closed by a thread, afterwards
            while not all(environment.closed for environment in counting.made):
                await asyncio.sleep(0.01)
            while asyncio.all_tasks() != {asyncio.current_task()}:
                await asyncio.sleep(0.01)

    asyncio.run(sample_turns())
    assert counting.made and all(environment.closed == 1 for environment in counting.made)
