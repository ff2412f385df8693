"""Which replica a turn goes to, whatever comes in whichever order."""

import asyncio
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl.engines.server.router import SPREAD, Lane, Router


def make(replicas=2, limit=4):
    return Router([Lane(serving=True) for _ in range(replicas)], limit)


class Turns:
    """Turns that ask a router for a place, and hold it until they are told to leave."""

    def __init__(self, router):
        self.router, self.tasks, self.placed, self._leave = router, {}, {}, {}

    async def ask(self, number, trajectory_id, avoid=None):
        async def turn():
            async with self.router.place(trajectory_id, number, avoid) as place:
                self.placed[number] = place
                await self._leave[number].wait()

        self._leave[number] = asyncio.Event()
        self.tasks[number] = asyncio.ensure_future(turn())
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def leave(self, number):
        self._leave[number].set()
        await self.tasks.pop(number)
        self.placed.pop(number)
        await asyncio.sleep(0)

    async def cancel(self, number):
        task = self.tasks.pop(number)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        self.placed.pop(number, None)
        await asyncio.sleep(0)


def test_a_group_begins_together_and_groups_apart():
    async def go():
        turns = Turns(make(limit=100))
        for number in range(32):
            await turns.ask(number, f"{number // 8}/{number % 8}")
        homes = [{turns.placed[number] for number in range(8 * group, 8 * group + 8)} for group in range(4)]
        assert sorted(map(list, homes)) == [[0], [0], [1], [1]]

    asyncio.run(go())


def test_a_large_group_is_spread():
    async def go():
        turns = Turns(make(limit=100))
        for number in range(60):
            await turns.ask(number, f"group/{number}")
        assert abs(len(turns.router.lanes[0].busy) - len(turns.router.lanes[1].busy)) <= SPREAD

    asyncio.run(go())


def test_a_trajectory_stays_and_moves_with_its_group_when_its_replica_is_gone():
    async def go():
        router = make(replicas=3, limit=100)
        turns = Turns(router)
        for number in range(4):
            await turns.ask(number, f"g/{number}")
        (home,) = set(turns.placed.values())
        for number in range(4):
            await turns.leave(number)
            await turns.ask(number, f"g/{number}")
            assert turns.placed[number] == home
            await turns.leave(number)
        router.lanes[home].serving = False
        for number in range(4):
            await turns.ask(number, f"g/{number}")
        (moved,) = set(turns.placed.values())
        assert moved != home
        for number in range(4):
            await turns.leave(number)
            router.release(f"g/{number}")
        assert [lane.homed for lane in router.lanes] == [0, 0, 0]

    asyncio.run(go())


def test_a_turn_leaves_a_full_replica_for_an_idle_one():
    async def go():
        router = make(limit=20)
        turns = Turns(router)
        for number in range(40):
            await turns.ask(number, f"{number // 4}/{number % 4}")
        idle = [number for number, place in turns.placed.items() if place == 1]
        busy = [number for number, place in turns.placed.items() if place == 0]
        assert len(idle) == len(busy) == 20
        for number in idle:
            await turns.leave(number)
        first = busy[0]
        await turns.ask(100, f"{first // 4}/{first % 4}")
        assert turns.placed[100] == 1
        assert [lane.homed for lane in router.lanes] == [19, 21], "and it stays there"

    asyncio.run(go())


def test_a_replica_to_be_avoided_is_better_than_none():
    async def go():
        turns = Turns(make(limit=1))
        await turns.ask(0, "a/0", avoid=0)
        await turns.ask(1, "b/0", avoid=1)
        await turns.ask(2, "c/0", avoid=1)
        assert turns.placed == {0: 1, 1: 0}
        await turns.leave(0)
        assert turns.placed == {1: 0, 2: 1}

    asyncio.run(go())


def test_whoever_waits_hears_of_an_error():
    async def go():
        router = make(replicas=1, limit=1)
        turns = Turns(router)
        await turns.ask(0, "a/0")
        await turns.ask(1, "b/0")
        router.fail(RuntimeError("over"))
        with pytest.raises(RuntimeError, match="over"):
            await turns.tasks[1]
        with pytest.raises(RuntimeError, match="over"):
            async with router.place("c/0", 2):
                pass

    asyncio.run(go())


def test_a_turn_of_a_replica_that_never_left_counts_until_it_does():
    """`idle` waits for those that are on their way, not for those that wait."""

    async def go():
        router = make(replicas=1, limit=1)
        turns = Turns(router)
        await turns.ask(0, "a/0")
        router.hold()
        await turns.ask(1, "b/0")
        idle = asyncio.ensure_future(router.idle())
        await asyncio.sleep(0)
        assert not idle.done()
        await turns.leave(0)
        await idle
        assert not turns.placed
        router.go_on()
        await asyncio.sleep(0)
        assert turns.placed == {1: 0}

    asyncio.run(go())


events = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 5), st.none() | st.integers(0, 2)),
        st.tuples(st.just("leave"), st.integers(0, 99), st.none()),
        st.tuples(st.just("cancel"), st.integers(0, 99), st.none()),
        st.tuples(st.just("lose"), st.integers(0, 2), st.none()),
        st.tuples(st.just("find"), st.integers(0, 2), st.none()),
        st.tuples(st.just("hold"), st.integers(0, 1), st.none()),
    ),
    max_size=80,
)


@settings(max_examples=150, deadline=None)
@given(events=events, limit=st.integers(1, 60))
def test_bounds_hold_whatever_happens(events, limit):
    """No replica gets too many turns or any while it is gone, none waits in vain, none overtakes another for the same
    replicas, and none idles beside a long queue."""

    async def go():
        router = make(replicas=3, limit=limit)
        turns, asked, held = Turns(router), 0, 0
        opened = set()
        for kind, n, avoid in events:
            serving = [lane.serving for lane in router.lanes]
            before = {number: place for number, place in turns.placed.items()}
            if kind == "ask":
                for _ in range(7):
                    opened.add(f"{n}/{asked}")
                    await turns.ask(asked, f"{n}/{asked}", avoid)
                    asked += 1
            elif kind in ("leave", "cancel"):
                chosen = sorted(turns.placed if kind == "leave" else turns.tasks)
                if chosen:
                    await getattr(turns, kind)(chosen[n % len(chosen)])
            elif kind == "hold":
                if held:
                    router.go_on()
                else:
                    router.hold()
                held = not held
            else:
                router.lanes[n].serving = kind == "find"
                router.dispatch()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            busy = [len(lane.busy) for lane in router.lanes]
            assert max(busy) <= limit and sum(busy) == len(turns.placed)
            for number, place in turns.placed.items():
                if number not in before:
                    assert router.lanes[place].serving or serving[place]
            assert len(turns.tasks) == len(turns.placed) + router.waiting
            options = [b for lane, b in zip(router.lanes, busy, strict=True) if lane.serving]
            if router.waiting and not held:
                assert all(b >= limit - router.slack for b in options if len(options) > 1) or avoided(router)
                assert not options or max(options) == limit
        homed = sum(lane.homed for lane in router.lanes)
        assert homed <= len(opened)
        for name in opened:
            router.release(name)
        assert [lane.homed for lane in router.lanes] == [0, 0, 0]
        for number in list(turns.tasks):
            await turns.cancel(number)
        assert not any(lane.busy for lane in router.lanes) and not router.waiting

    def avoided(router):
        return any(ticket.avoid is not None for ticket in router._waiting)

    asyncio.run(go())
