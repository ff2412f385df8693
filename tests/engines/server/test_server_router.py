"""The assignment of turns to replicas, for any order of events."""

import asyncio
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl.engines.server.router import GROUP_SLACK, ReplicaLoad, Router


def make(replicas=2, limit=4):
    return Router([ReplicaLoad(serving=True) for _ in range(replicas)], limit)


class Turns:
    """Turns that request a slot of a router, and hold it until `leave`."""

    def __init__(self, router):
        self.router, self.tasks, self.placed, self.avoided, self._leave = router, {}, {}, {}, {}

    def any_waiting_avoids(self):
        """Whether a waiting turn avoids a replica."""
        return any(self.avoided[number] is not None for number in self.tasks if number not in self.placed)

    async def ask(self, number, trajectory_id, avoid=None):
        async def turn():
            async with self.router.slot(trajectory_id, number, avoid) as replica:
                self.placed[number] = replica
                await self._leave[number].wait()

        self.avoided[number], self._leave[number] = avoid, asyncio.Event()
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


def test_groups_start_on_one_replica_each():
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
        assert abs(len(turns.router.loads[0].busy) - len(turns.router.loads[1].busy)) <= GROUP_SLACK

    asyncio.run(go())


def test_trajectories_move_with_their_group_when_a_replica_is_lost():
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
        router.loads[home].serving = False
        for number in range(4):
            await turns.ask(number, f"g/{number}")
        (moved,) = set(turns.placed.values())
        assert moved != home
        for number in range(4):
            await turns.leave(number)
            router.release(f"g/{number}")
        assert [load.trajectories for load in router.loads] == [0, 0, 0]

    asyncio.run(go())


def test_a_turn_moves_from_a_full_replica_to_an_idle_one():
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
        assert [load.trajectories for load in router.loads] == [19, 21], "and it stays there"

    asyncio.run(go())


def test_an_avoided_replica_is_used_if_no_other_is_free():
    async def go():
        turns = Turns(make(limit=1))
        await turns.ask(0, "a/0", avoid=0)
        await turns.ask(1, "b/0", avoid=1)
        await turns.ask(2, "c/0", avoid=1)
        assert turns.placed == {0: 1, 1: 0}
        await turns.leave(0)
        assert turns.placed == {1: 0, 2: 1}

    asyncio.run(go())


def test_waiting_turns_raise_the_error():
    async def go():
        router = make(replicas=1, limit=1)
        turns = Turns(router)
        await turns.ask(0, "a/0")
        await turns.ask(1, "b/0")
        router.fail(RuntimeError("over"))
        with pytest.raises(RuntimeError, match="over"):
            await turns.tasks[1]
        with pytest.raises(RuntimeError, match="over"):
            async with router.slot("c/0", 2):
                pass

    asyncio.run(go())


def test_idle_waits_for_turns_in_flight_only():
    """`idle` waits for turns in flight, not for turns in the queue."""

    async def go():
        router = make(replicas=1, limit=1)
        turns = Turns(router)
        await turns.ask(0, "a/0")
        router.pause()
        await turns.ask(1, "b/0")
        idle = asyncio.ensure_future(router.idle())
        await asyncio.sleep(0)
        assert not idle.done()
        await turns.leave(0)
        await idle
        assert not turns.placed
        router.resume()
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
def test_limits_hold_for_any_order_of_events(events, limit):
    """No replica gets more turns than the limit, or any while it is lost; no turn waits while a replica is free."""

    async def go():
        router = make(replicas=3, limit=limit)
        turns, requested, held = Turns(router), 0, 0
        opened = set()
        for kind, n, avoid in events:
            serving = [load.serving for load in router.loads]
            before = {number: place for number, place in turns.placed.items()}
            if kind == "ask":
                for _ in range(7):
                    opened.add(f"{n}/{requested}")
                    await turns.ask(requested, f"{n}/{requested}", avoid)
                    requested += 1
            elif kind in ("leave", "cancel"):
                chosen = sorted(turns.placed if kind == "leave" else turns.tasks)
                if chosen:
                    await getattr(turns, kind)(chosen[n % len(chosen)])
            elif kind == "hold":
                if held:
                    router.resume()
                else:
                    router.pause()
                held = not held
            else:
                router.loads[n].serving = kind == "find"
                router.dispatch()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            busy = [len(load.busy) for load in router.loads]
            assert max(busy) <= limit and sum(busy) == len(turns.placed)
            for number, place in turns.placed.items():
                if number not in before:
                    assert router.loads[place].serving or serving[place]
            assert len(turns.tasks) == len(turns.placed) + router.waiting
            options = [b for load, b in zip(router.loads, busy, strict=True) if load.serving]
            if router.waiting and not held:
                assert all(b >= limit - router.slack for b in options if len(options) > 1) or turns.any_waiting_avoids()
                assert not options or max(options) == limit
        trajectories = sum(load.trajectories for load in router.loads)
        assert trajectories <= len(opened)
        for name in opened:
            router.release(name)
        assert [load.trajectories for load in router.loads] == [0, 0, 0]
        for number in list(turns.tasks):
            await turns.cancel(number)
        assert not any(load.busy for load in router.loads) and not router.waiting

    asyncio.run(go())


def test_a_released_trajectory_that_waits_is_not_assigned_again():
    """A slot becomes free between the release and the end of the waiting turn."""

    async def go():
        turns = Turns(router := make(replicas=1, limit=1))
        await turns.ask(0, "g/0")
        await turns.ask(1, "h/0")
        leaving = asyncio.ensure_future(turns.leave(0))
        router.release("h/0")
        await leaving
        assert 1 not in turns.placed
        await turns.cancel(1)
        router.release("g/0")
        assert router.loads[0].trajectories == 0 and not router.loads[0].busy and not router.waiting

    asyncio.run(go())
