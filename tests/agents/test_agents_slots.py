"""A limit on concurrent tasks: they run in order, and the next one begins before the last one ends."""

import asyncio

import pytest

from mtrl.agents.slots import Slots


def run_agent(count, names, body, begin=None):
    """Take slots by these names at the same time, call `body(name, log)` inside of each, and return the log."""
    log = []

    def begun(name):
        log.append(f"begin {name}")
        return (begin or (lambda name: name))(name)

    async def one(slots, name):
        async with slots.take(lambda: begun(name), lambda value: log.append(f"end {value}")) as value:
            await body(value, log)
        return name

    async def all_of_them():
        slots = Slots(count)
        done = await asyncio.gather(*(one(slots, name) for name in names), return_exceptions=True)
        assert slots.free == count and not slots.waiting
        return done

    return asyncio.run(asyncio.wait_for(all_of_them(), 10)), log


def test_the_next_task_begins_before_the_last_one_ends():
    async def body(name, log):
        await asyncio.sleep(0)

    done, log = run_agent(2, "abcd", body)
    assert done == list("abcd")
    assert log == ["begin a", "begin b", "begin c", "end a", "begin d", "end b", "end c", "end d"]


def test_a_failed_start_passes_the_slot_on():
    def begin(name):
        if name in "bc":
            raise ValueError(name)
        return name

    async def body(name, log):
        await asyncio.sleep(0)

    done, log = run_agent(1, "abcd", body, begin)
    assert [str(d) for d in done] == list("abcd") and isinstance(done[1], ValueError)
    assert log == ["begin a", "begin b", "begin c", "begin d", "end a", "end d"]


def test_a_failed_task_frees_its_slot():
    async def body(name, log):
        await asyncio.sleep(0)
        raise KeyError(name)

    done, log = run_agent(1, "ab", body)
    assert all(isinstance(error, KeyError) for error in done)
    assert log == ["begin a", "begin b", "end a", "end b"]


@pytest.mark.parametrize("moment", ["while it waits", "as it is let in"])
def test_a_cancelled_task_frees_its_slot(moment):
    log = []

    async def story():
        slots, gate = Slots(1), asyncio.Event()

        async def holder():
            async with slots.take(lambda: "first", log.append):
                await gate.wait()

        async def waiter(name):
            async with slots.take(lambda: name, log.append):
                log.append(f"inside {name}")

        first = asyncio.create_task(holder())
        await asyncio.sleep(0)
        second, third = asyncio.create_task(waiter("second")), asyncio.create_task(waiter("third"))
        await asyncio.sleep(0)
        if moment == "while it waits":
            second.cancel()
            await asyncio.sleep(0)
            gate.set()
        else:
            gate.set()
            while not log:  # the holder has left, and the second has its value, but has not woken up
                await asyncio.sleep(0)
            second.cancel()
        await asyncio.gather(first, third)
        with pytest.raises(asyncio.CancelledError):
            await second
        assert slots.free == 1

    asyncio.run(asyncio.wait_for(story(), 10))
    assert log[0] == "first" and log[-2:] == ["inside third", "third"]
    assert ("second" in log) == (moment == "as it is let in") and "inside second" not in log
