"""Coroutines that ignore their cancellation: neither event loops nor processes wait for them."""

import asyncio
import subprocess
import sys
import textwrap

import pytest

from mtrl.environments.detachable_task import DetachableTask


def program(code):
    """Run the code in a process with a time limit, and return the words that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_an_event_loop_ends_although_a_coroutine_ignores_its_cancellation():
    code = """
    import asyncio
    from mtrl.environments.pool import CallTimeoutError, EnvironmentPool

    async def stubborn():
        while True:
            try:
                await asyncio.sleep(600)
            except BaseException as error:
                print(type(error).__name__, flush=True)

    async def main():
        pool = EnvironmentPool(1)
        try:
            await pool.call(stubborn, timeout=0.1)
        except CallTimeoutError:
            print("late", flush=True)
        pool.close()
        await asyncio.sleep(0.1)

    asyncio.run(main())
    print("over")
    """
    assert program(code) == ["late", "CancelledError", "over"]


def test_a_detached_coroutine_can_clean_up():
    events = []

    async def tidy():
        try:
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0)
            events.append("tidy")

    async def main():
        detachable = DetachableTask(tidy())
        task = asyncio.ensure_future(detachable)
        await asyncio.sleep(0)
        detachable.detach()
        task.cancel()
        await asyncio.wait((task,))
        assert task.cancelled()

    asyncio.run(main())
    assert events == ["tidy"]


def test_an_attached_coroutine_behaves_as_without_the_wrapper():
    async def work():
        for _ in range(2):  # as a library that retries
            try:
                async with asyncio.timeout(0.01):
                    await asyncio.sleep(600)
            except TimeoutError:
                pass
        with pytest.raises(LookupError):
            await asyncio.wait_for(breaks(), 5)
        return await asyncio.gather(asyncio.sleep(0, "a"), asyncio.to_thread(str, 1))

    async def breaks():
        raise LookupError

    async def awaited():
        return await DetachableTask(work())

    assert asyncio.run(awaited()) == ["a", "1"]


def test_a_coroutine_that_exits_raises_an_error_and_the_loop_continues():
    async def exits():
        await asyncio.sleep(0)
        sys.exit(3)

    async def main():
        with pytest.raises(RuntimeError, match=r"SystemExit\(3\)"):
            await asyncio.ensure_future(DetachableTask(exits()))
        return "on"

    assert asyncio.run(main()) == "on"
