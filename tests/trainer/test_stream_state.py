"""Checkpoints of the stream: no group is lost or repeated, under the same settings and under others."""

import json

import pytest
from streams import FakeRollouts, Rows, ids, make, rows_of, run, soon, train

from mtrl.trainer.data.experience import Collector, of_sources


async def interrupted(steps=3, **settings):
    """Stop a stream after these steps. Return its trained groups, its rows, and its state as JSON."""
    rows = Rows()
    stream = make(rows=rows, **settings)
    found = await train(stream, steps, close=False)
    await soon(lambda: stream.finished and stream.tasks)
    state, drawn = json.loads(json.dumps(stream.state())), rows.drawn
    await stream.close()
    rows.drawn = drawn
    return found, rows, state


@pytest.mark.parametrize("on_stale", ["wait", "requeue"])
def test_resuming_loses_and_repeats_no_group(on_stale):
    async def stop_and_go_on():
        before, rows, state = await interrupted(batch=4, lag=3, on_stale=on_stale, max_concurrent_groups=3)
        stream = make(rows=rows, batch=4, lag=3, on_stale=on_stale)
        stream.rollouts.version = 3
        stream.restore(state)
        finished = {group.group_id for group in stream.finished.values()}
        unfinished = [entry["group"]["group_id"] for entry in state[1:] if not entry["group"]["trajectories"]]
        assert json.loads(json.dumps(stream.state())) == state
        after = await train(stream, 6, start=3)
        names = stream.rollouts.names
        assert finished and not finished.intersection(names)  # finished groups are not sampled again
        assert names[: len(unfinished)] == unfinished  # unfinished groups come first
        return before, after, stream

    before, after, stream = run(stop_and_go_on())
    trained = rows_of([*before, *after])
    assert len(set(trained)) == len(trained) == 36
    left = {slot.row["n"] for slot in [*stream.admission.outstanding, *stream.admission.again]}
    assert set(trained) | left == set(range(stream.admission.admitted)) and not left.intersection(trained)
    for step, experience in enumerate(after, start=3):
        assert all(step - t.oldest_version <= 3 for g in experience.groups for t in g.trajectories)


@pytest.mark.parametrize(("batch", "lag"), [(4, 1), (2, 1), (8, 1)])
def test_a_state_can_be_restored_under_other_settings(batch, lag):
    """Groups that are too old under a smaller bound are sampled again; the others count."""

    async def stop_and_go_on():
        before, rows, state = await interrupted(batch=4, lag=3, max_concurrent_groups=5)
        stream = make(rows=rows, batch=batch, lag=lag)
        stream.rollouts.version = 3
        stream.restore(state)
        return before, await train(stream, 8, start=3)

    before, after = run(stop_and_go_on())
    trained = rows_of([*before, *after])
    assert len(set(trained)) == len(trained) == 12 + 8 * batch
    names = [name for names in ids([*before, *after]) for name in names]
    assert len(set(names)) == len(names)


def test_a_synchronous_run_can_restore_the_state_and_vice_versa():
    async def stop_and_go_on():
        before, rows, state = await interrupted(batch=4, lag=3, max_concurrent_groups=5)
        collector = make(Collector, rows=rows)
        collector.restore(state)
        between = await train(collector, 1, start=3)
        stream = make(rows=rows)
        stream.restore(json.loads(json.dumps(collector.state())))
        stream.rollouts.version = 4
        return before, between, await train(stream, 4, start=4), [entry["group"]["row"]["n"] for entry in state[1:]]

    before, between, after, left = run(stop_and_go_on())
    assert len(left) > 4 and rows_of(between) == left[:4]
    trained = rows_of([*before, *between, *after])
    assert len(set(trained)) == len(trained) == 32
    names = [name for names in ids([*before, *after]) for name in names]
    assert len(set(names)) == len(names)


def test_groups_of_removed_sources_are_left_out(caplog):
    state = [{"version": 3, "admitted": 8, "batch": 2}]
    state += [{"number": n, "group": {"row": {"id": f"{source}/{n}"}}} for n, source in enumerate(["sums", "maze"])]
    assert of_sources(state, ["sums", "search"]) == state[:2] and "left out: 1" in caplog.text
    caplog.clear()
    assert of_sources(state, ["sums", "maze"]) == of_sources(state, []) == state and not caplog.text


def test_a_failed_step_loses_no_stored_prompt():
    """A step that failed was never trained, so its prompts are in the state that is saved next."""

    class Dying(FakeRollouts):
        async def play(self, group_id, row):
            raise RuntimeError("the engine is gone")

    async def stop_and_fail():
        _, rows, state = await interrupted(batch=4, lag=3, max_concurrent_groups=5)
        collector = make(Collector, rows=rows, rollouts=Dying())
        collector.restore(state)
        with pytest.raises(RuntimeError, match="the engine is gone"):
            await collector.collect(3)
        return [entry for entry in state if "group" in entry], json.loads(json.dumps(collector.state()))

    before, after = run(stop_and_fail())
    assert before == after != []


def test_a_synchronous_run_continues_as_a_stream():
    async def go_on():
        rows = Rows()
        rows.drawn = 12
        stream = make(rows=rows)
        stream.restore(make(Collector).state())
        stream.rollouts.version = 3
        return await train(stream, 2, start=3)

    found = run(go_on())
    assert stream_numbers(found) == list(range(12, 12 + 8))


def stream_numbers(found):
    return sorted(
        4 * int(step.removeprefix("step")) + int(i)
        for names in ids(found)
        for step, i in (name.split("/") for name in names)
    )


def test_groups_that_are_taken_back_are_trained_by_the_next_run():
    """A teacher that does not answer ends the run between `collect` and `publish`."""

    async def take_back_and_go_on():
        rows = Rows()
        stream = make(rows=rows, batch=4, lag=1)
        before = await train(stream, 2, close=False)
        experience = await stream.collect(2)
        stream.take_back(experience.groups)
        state = json.loads(json.dumps(stream.state()))
        await stream.close()
        after = make(rows=rows, batch=4, lag=1)
        after.rollouts.version = 2
        after.restore(state)
        return before, experience, await train(after, 3, start=2), after.rollouts.names

    before, experience, after, names = run(take_back_and_go_on())
    taken = [group.group_id for group in experience.groups]
    trained = [name for each in ids([*before, *after]) for name in each]
    assert set(taken) <= set(trained) and not set(taken) & set(names)  # they are not sampled again
    assert len(set(trained)) == len(trained)
