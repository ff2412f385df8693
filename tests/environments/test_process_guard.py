"""What code of an environment may not do to the process that plays it."""

import asyncio
import os
import sys
import threading

import pytest

from mtrl.environments.pool import EnvironmentPool


def called(function):
    async def main():
        pool = EnvironmentPool(1)
        try:
            return await pool.call(function, timeout=30)
        finally:
            pool.close()

    return asyncio.run(main())


def exits():
    os._exit(0)


async def exits_async():
    await asyncio.sleep(0)
    os._exit(0)


@pytest.mark.parametrize("function", [exits, exits_async])
def test_one_that_exits_fails_its_call_alone(function):
    with pytest.raises(RuntimeError, match=r"os._exit\(0\) in an environment"):
        called(function)


def test_a_child_that_it_forks_may_exit():
    def forks():
        child = os.fork()
        if child == 0:
            os._exit(7)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert called(forks) == 7


def test_the_event_loop_of_the_run_goes_on():
    async def stops():
        asyncio.get_running_loop().stop()

    with pytest.raises(RuntimeError, match="an environment may not stop the event loop"):
        called(stops)


def test_a_loop_of_its_own_may_be_stopped():
    def runs():
        loop = asyncio.new_event_loop()
        loop.call_soon(loop.stop)
        loop.run_forever()
        loop.close()
        return asyncio.run(asyncio.sleep(0, "done"))

    assert called(runs) == "done"


def test_what_it_starts_is_guarded_too_and_its_threads_hold_up_no_exit():
    said = []

    def starts():
        def ends():
            try:
                os._exit(0)
            except SystemExit as error:
                said.append(str(error))

        thread = threading.Thread(target=ends)
        thread.start()
        thread.join()
        return thread.daemon

    assert called(starts) and said == ["os._exit(0) in an environment"]
    assert not threading.Thread(target=print).daemon, "one that is started elsewhere is as it was"


def test_the_recursion_limit_is_put_back():
    before = sys.getrecursionlimit()
    called(lambda: sys.setrecursionlimit(500))
    assert sys.getrecursionlimit() == before
