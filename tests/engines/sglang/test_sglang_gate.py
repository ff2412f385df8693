"""A gate that delays turns."""

import asyncio

from mtrl.engines.sglang.gate import TurnGate


async def until_all_wait():
    """Return when all tasks of the event loop have had time to come to a wait."""
    for _ in range(100):
        await asyncio.sleep(0)


def test_turns_wait_while_the_gate_is_shut():
    async def main():
        gate, order = TurnGate(), []

        async def turn(name):
            await gate.enter()
            order.append(name)

        await turn("before")
        gate.shut()
        waiting = [asyncio.create_task(turn(name)) for name in "ab"]
        await until_all_wait()
        assert order == ["before"] and gate.inside == 1 and not gate.is_open
        gate.open()
        await asyncio.gather(*waiting)
        assert sorted(order[1:]) == ["a", "b"] and gate.inside == 3

    asyncio.run(main())


def test_emptied_returns_when_the_last_has_left():
    async def main():
        gate = TurnGate()
        await gate.emptied()
        await gate.enter()
        await gate.enter()
        empty = asyncio.create_task(gate.emptied())
        gate.leave()
        await until_all_wait()
        assert not empty.done()
        gate.leave()
        await asyncio.wait_for(empty, 1)

    asyncio.run(main())


def test_a_gate_works_on_consecutive_event_loops():
    gate = TurnGate()

    async def pause():
        gate.shut()
        waiting = asyncio.create_task(gate.enter())
        await until_all_wait()
        gate.open()
        await waiting
        empty = asyncio.create_task(gate.emptied())
        await asyncio.sleep(0)
        gate.leave()
        await asyncio.wait_for(empty, 1)

    asyncio.run(pause())
    asyncio.run(pause())


def test_a_cancelled_wait_is_not_counted_as_inside():
    async def main():
        gate = TurnGate()
        gate.shut()
        waiting = asyncio.create_task(gate.enter())
        await until_all_wait()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        gate.open()
        assert gate.inside == 0

    asyncio.run(main())
