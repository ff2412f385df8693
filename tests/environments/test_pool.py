"""Blocking calls on threads: a call that hangs affects only its own caller, by a time-out."""

import asyncio
import gc
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial

import pytest

from mtrl.environments.pool import CallTimeoutError, EnvironmentPool


@pytest.fixture
def release():
    """Event that is set at the end of the test, so that its threads end."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def make_pool():
    pools = []

    def make(workers):
        pools.append(EnvironmentPool(workers))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def pool_threads():
    """Return the threads of all pools, including those of earlier tests; tests compare which are new."""
    return {thread for thread in threading.enumerate() if thread.name == "mtrl-environment"}


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


async def many(pool, functions, timeout=10.0):
    return await asyncio.gather(*(pool.call(f, timeout=timeout) for f in functions), return_exceptions=True)


def kinds(results):
    return [type(result).__name__ if isinstance(result, BaseException) else result for result in results]


def test_calls_get_their_arguments_and_return_results(make_pool):
    async def go(pool):
        return await asyncio.gather(*(pool.call(pow, i, 2, timeout=5) for i in range(20)))

    assert run(go(make_pool(3))) == [i**2 for i in range(20)]


def test_calls_run_concurrently_on_other_threads(make_pool):
    together = threading.Barrier(4, timeout=10)

    def meet():
        together.wait()
        return threading.current_thread() is not threading.main_thread()

    assert run(many(make_pool(4), [meet] * 4)) == [True] * 4


def test_a_hung_call_is_abandoned_and_its_thread_replaced(make_pool, release):
    """With one worker, three hung calls in sequence do not block the next call."""
    pool = make_pool(1)

    async def go():
        hung = kinds(await many(pool, [release.wait] * 3, timeout=0.05))
        return hung, await many(pool, [lambda: "on"] * 2)

    assert run(go()) == (["CallTimeoutError"] * 3, ["on", "on"])


def test_the_error_names_the_call_and_the_key(make_pool, release):
    class Env:
        def step(self):
            release.wait()

    with pytest.raises(CallTimeoutError, match=r"Env.step took longer than environment.step_timeout=0.01 s"):
        run(make_pool(1).call(Env().step, timeout=0.01))


def test_the_repr_of_a_call_is_not_computed_without_an_error(make_pool):
    """The `repr` of a `partial` is as long as its arguments, such as a corpus that environments share."""

    class Large:
        def __repr__(self):
            raise AssertionError("the repr is not needed")

    pool = make_pool(1)
    assert asyncio.run(pool.call(partial(id, Large()), timeout=60))


def test_the_time_limit_excludes_the_wait_for_a_thread(make_pool):
    """Five calls share one thread; together they take longer than the limit of one call."""
    results = run(many(make_pool(1), [partial(time.sleep, 0.1)] * 5, timeout=0.3))
    assert results == [None] * 5


def test_the_thread_of_a_cancelled_call_is_replaced(make_pool, release):
    """The time limit of an episode cancels its call, running or still queued."""
    pool, entered = make_pool(1), threading.Event()
    before = pool_threads()

    def hang():
        entered.set()
        release.wait()

    async def go():
        for _ in range(2):
            entered.clear()
            running, queued = (asyncio.ensure_future(pool.call(hang, timeout=60)) for _ in range(2))
            while not entered.is_set():
                await asyncio.sleep(0.001)
            for call in (queued, running):
                call.cancel()
                assert kinds(await asyncio.gather(call, return_exceptions=True)) == ["CancelledError"]
        return await many(pool, [lambda: "on"] * 3)

    assert run(go()) == ["on"] * 3
    assert len(pool_threads() - before) == 2, "one new thread for each hung call, none for a queued call"


def test_the_thread_of_an_abandoned_call_ends_with_the_call(make_pool, release):
    pool = make_pool(1)

    async def go():
        await many(pool, [release.wait] * 4, timeout=0.02)

    before = pool_threads()
    run(go())
    later = pool_threads() - before
    assert len(later) == 4
    release.set()
    deadline = time.monotonic() + 10
    while len(pool_threads() & later) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(pool_threads() & later) == 1, (
        "the threads of all four abandoned calls ended; the last replacement remains"
    )
    assert run(many(pool, [lambda: "on"])) == ["on"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("bad"), "ValueError('bad')"),
        (TimeoutError("the environment's own"), """TimeoutError("the environment's own")"""),
        (StopIteration(3), "RuntimeError('StopIteration(3)')"),  # which no future accepts
        (SystemExit(1), "RuntimeError('SystemExit(1)')"),
        (KeyboardInterrupt(), "RuntimeError('KeyboardInterrupt()')"),
    ],
)
def test_errors_propagate_and_the_thread_continues(make_pool, error, expected):
    def fail():
        raise error

    pool = make_pool(1)
    before = pool_threads()
    results = run(many(pool, [fail, fail, lambda: "on"]))
    assert [repr(r) for r in results] == [expected, expected, "'on'"]
    assert pool_threads() <= before


def test_async_functions_are_awaited(make_pool):
    async def answer(value):
        await asyncio.sleep(0)
        return value

    async def go(pool):
        wrapped = await pool.call(lambda: answer(2), timeout=5)
        return await pool.call(answer, 1, timeout=5), wrapped

    assert run(go(make_pool(1))) == (1, 2)


def test_async_functions_have_the_time_limit_too(make_pool):
    async def stubborn():
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if leave:
                    raise

    leave = []

    async def go(pool):
        results = await many(pool, [stubborn, lambda: stubborn()], timeout=0.02)
        leave.append(True)
        return results

    assert kinds(run(go(make_pool(1)))) == ["CallTimeoutError"] * 2


def test_an_environment_that_cancels_itself_does_not_cancel_the_run(make_pool):
    async def confused():
        raise asyncio.CancelledError

    assert kinds(run(many(make_pool(1), [confused]))) == ["RuntimeError"]


def test_a_result_after_the_time_limit_is_discarded(make_pool, release):
    discarded = []

    def slow():
        release.wait()
        return "thing"

    async def go(pool):
        with pytest.raises(CallTimeoutError):
            await pool.call(slow, timeout=0.02, discard=discarded.append)
        assert not discarded
        release.set()
        while not discarded:
            await asyncio.sleep(0.01)

    run(go(make_pool(1)))
    assert discarded == ["thing"]


def test_a_result_at_the_moment_of_cancellation_is_discarded(make_pool):
    """The call has returned, but the coroutine is cancelled before the event loop reports the result."""
    discarded = []
    entered, leave = threading.Event(), threading.Event()

    def work():
        entered.set()
        leave.wait()
        return "thing"

    async def go(pool):
        call = asyncio.ensure_future(pool.call(work, timeout=30, discard=discarded.append))
        while not entered.is_set():
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        leave.set()
        time.sleep(0.1)  # the event loop is blocked while the call returns
        call.cancel()
        assert kinds(await asyncio.gather(call, return_exceptions=True)) == ["CancelledError"]
        while not discarded:
            await asyncio.sleep(0.001)

    run(go(make_pool(1)))
    assert discarded == ["thing"]


def test_the_process_exits_while_a_call_hangs():
    program = """
import asyncio, time
from mtrl.environments.pool import CallTimeoutError, EnvironmentPool

async def go():
    pool = EnvironmentPool(2)
    try:
        await pool.call(time.sleep, 600, timeout=0.05)
    except CallTimeoutError:
        print("abandoned")

asyncio.run(go())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "abandoned", "")


@pytest.mark.parametrize("cancellations", [1, 2])
def test_finish_makes_its_call_although_the_caller_is_cancelled(make_pool, release, cancellations):
    """The caller is cancelled while every thread is busy; the thread takes other calls afterwards."""
    done = threading.Event()

    async def go(pool):
        busy = asyncio.ensure_future(pool.call(release.wait, timeout=20))
        await asyncio.sleep(0.05)
        last = asyncio.ensure_future(pool.finish(done.set, timeout=20))
        for _ in range(cancellations):
            await asyncio.sleep(0.01)
            last.cancel()
        await asyncio.wait([last])
        assert last.cancelled() and not done.is_set()
        release.set()
        await busy
        return await pool.call(done.wait, 10, timeout=20), await many(pool, [done.is_set] * 8)

    assert run(go(make_pool(1))) == (True, [True] * 8)


@pytest.mark.parametrize("kind", ["coroutine function", "function that returns a coroutine"])
def test_finish_completes_an_async_call(make_pool, kind):
    begun, done = threading.Event(), threading.Event()

    async def close():
        begun.set()
        await asyncio.sleep(0.05)
        done.set()

    async def go(pool):
        last = asyncio.ensure_future(pool.finish(close if kind == "coroutine function" else lambda: close(), timeout=9))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        last.cancel()
        await asyncio.wait([last])
        return await pool.call(done.wait, 10, timeout=20)

    assert run(go(make_pool(2)))


def test_finish_raises_the_errors_of_its_call(make_pool, release):
    async def go(pool):
        with pytest.raises(ZeroDivisionError):
            await pool.finish(lambda: 1 // 0, timeout=5)
        with pytest.raises(CallTimeoutError):
            await pool.finish(release.wait, timeout=0.05)
        await pool.finish(lambda: None, timeout=5)

    run(go(make_pool(1)))


def test_finish_makes_its_call_although_the_event_loop_ends_first(make_pool, release):
    done = threading.Event()
    pool = make_pool(1)

    async def go():
        calls = pool.call(release.wait, timeout=20), pool.finish(done.set, timeout=20)
        await asyncio.wait([asyncio.ensure_future(call) for call in calls], timeout=0.05)
        assert not done.is_set()

    asyncio.run(go())
    assert done.wait(10)


def test_an_error_that_arrives_at_the_moment_of_a_cancellation_is_not_reported_by_asyncio():
    """The caller no longer waits, so the error has no reader; asyncio would write its traceback to stderr."""
    reported, raising = [], threading.Event()

    def fail():
        raising.set()
        raise ValueError("late")

    async def cancel_a_call(pool):
        call = asyncio.ensure_future(pool.call(fail, timeout=5.0))
        await asyncio.sleep(0)  # the call is on its thread
        raising.wait(5)
        time.sleep(0.05)  # blocks the loop, so that the cancellation comes before the error
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call

    async def run():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context["message"]))
        pool = EnvironmentPool(1)
        await cancel_a_call(pool)
        pool.close()

    before = pool_threads()
    asyncio.run(run())
    for thread in pool_threads() - before:
        thread.join(5)  # it refers to the call
    gc.collect()
    assert reported == []
