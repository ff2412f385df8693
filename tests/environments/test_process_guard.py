"""What code of an environment may not do to the process that plays it."""

import asyncio
import os
import queue
import sys
import threading
from functools import partial

import pytest

from mtrl.command.checks import import_plugins
from mtrl.environments.family import get_family
from mtrl.environments.pool import EnvironmentPool
from mtrl.errors import UserError
from mtrl.utils.functions import load_function
from mtrl.utils.process_guard import CallTimeoutError, import_guarded, in_time


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


def module_of(folder, monkeypatch, code):
    """The name of a module that holds this code; it was never imported."""
    name = f"guarded_{abs(hash(code))}"
    (folder / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(folder))
    return name


@pytest.mark.parametrize("code", ["import os; os._exit(0)", "raise SystemExit(0)", "import sys; sys.exit()"])
def test_a_module_that_ends_the_program_is_not_imported(code, tmp_path, monkeypatch):
    name = module_of(tmp_path, monkeypatch, code)
    with pytest.raises(RuntimeError, match="its import ends the program by SystemExit"):
        import_guarded(name)
    for load, said in (
        (partial(get_family, "own", f"{name}.Env"), "environment.target"),
        (partial(load_function, f"{name}.pay", "reward.components.x"), "reward.components.x"),
        (partial(import_plugins, [name]), "plugins"),
    ):
        with pytest.raises(UserError, match=f"{said}.*cannot be imported .RuntimeError in {name}.py, line 1: its imp"):
            load()


def test_a_module_may_set_the_recursion_limit(tmp_path, monkeypatch):
    before = sys.getrecursionlimit()
    name = module_of(tmp_path, monkeypatch, f"import sys; sys.setrecursionlimit({before + 7})")
    try:
        import_guarded(name)
        assert sys.getrecursionlimit() == before + 7
    finally:
        sys.setrecursionlimit(before)


def test_a_call_in_time_gives_its_result_or_its_own_error():
    def empty():
        raise queue.Empty

    assert in_time(lambda: 3, 60.0) == 3
    with pytest.raises(queue.Empty):
        in_time(empty, 60.0)
    with pytest.raises(SystemExit, match="in an environment"):
        in_time(exits, 60.0)
    with pytest.raises(CallTimeoutError, match="it took longer than 0.1 s"):
        in_time(partial(threading.Event().wait, 60.0), 0.1)
