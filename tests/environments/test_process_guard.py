"""The code of an environment cannot end or stop the process that runs it."""

import asyncio
import os
import queue
import subprocess
import sys
import threading
from functools import partial

import pytest

from mtrl.command.checks import import_plugins
from mtrl.environments.family import get_family
from mtrl.environments.pool import EnvironmentPool
from mtrl.errors import UserError
from mtrl.utils.process_guard import CallTimeoutError, import_guarded, in_time
from mtrl.utils.user_code import load_function


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
def test_os_exit_in_a_call_fails_only_that_call(function):
    with pytest.raises(RuntimeError, match=r"os._exit\(0\) in an environment"):
        called(function)


FORKS = """
import asyncio, os
from mtrl.environments.pool import EnvironmentPool

def forks():
    child = os.fork()
    if child == 0:
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

async def main():
    pool = EnvironmentPool(1)
    try:
        return await pool.call(forks, timeout=30)
    finally:
        pool.close()

print(asyncio.run(main()))
"""


def test_a_forked_child_may_exit():
    """In a new program: this process has threads of libraries after other tests, which need not survive a fork."""
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("7\n", 0), done.stderr


def test_the_event_loop_of_the_run_cannot_be_stopped():
    async def stops():
        asyncio.get_running_loop().stop()

    with pytest.raises(RuntimeError, match="an environment may not stop the event loop"):
        called(stops)


def test_an_environment_may_stop_its_own_event_loop():
    def runs():
        loop = asyncio.new_event_loop()
        loop.call_soon(loop.stop)
        loop.run_forever()
        loop.close()
        return asyncio.run(asyncio.sleep(0, "done"))

    assert called(runs) == "done"


def test_threads_of_an_environment_are_guarded_daemons():
    messages = []

    def starts():
        def ends():
            try:
                os._exit(0)
            except SystemExit as error:
                messages.append(str(error))

        thread = threading.Thread(target=ends)
        thread.start()
        thread.join()
        return thread.daemon

    assert called(starts) and messages == ["os._exit(0) in an environment"]
    assert not threading.Thread(target=print).daemon, "a thread that is started outside of an environment is no daemon"


def test_the_recursion_limit_is_restored():
    before = sys.getrecursionlimit()
    called(lambda: sys.setrecursionlimit(500))
    assert sys.getrecursionlimit() == before


def module_of(folder, monkeypatch, code):
    """Write a module with this code, and return its name, which was never imported before."""
    name = f"guarded_{abs(hash(code))}"
    (folder / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(folder))
    return name


@pytest.mark.parametrize("code", ["import os; os._exit(0)", "raise SystemExit(0)", "import sys; sys.exit()"])
def test_a_module_that_ends_the_program_is_not_imported(code, tmp_path, monkeypatch):
    name = module_of(tmp_path, monkeypatch, code)
    with pytest.raises(RuntimeError, match="its import ends the program by SystemExit"):
        import_guarded(name)
    for load, key in (
        (partial(get_family, "own", f"{name}.Env"), "environment.target"),
        (partial(load_function, f"{name}.pay", "reward.components.x"), "reward.components.x"),
        (partial(import_plugins, [name]), "plugins"),
    ):
        with pytest.raises(UserError, match=f"{key}.*cannot be imported .RuntimeError in {name}.py, line 1: its imp"):
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
