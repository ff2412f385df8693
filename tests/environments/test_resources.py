"""The resources of an episode are all released, in reverse order, even after errors."""

import asyncio
import os
import threading
import time
from contextlib import contextmanager
from tempfile import NamedTemporaryFile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrl.environments.base import BaseEnvironment, Resources
from mtrl.environments.pool import CallTimeoutError, EnvironmentPool
from mtrl.environments.tools import ToolEnvironment, tool
from mtrl.errors import UserError

KINDS = ["enter", "callback", "push"]


class Resource:
    def __init__(self, log, name, fails):
        self.log, self.name, self.fails = log, name, fails
        log.append(f"+{name}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.log.append(f"-{self.name}")
        if self.fails:
            raise OSError(self.name)

    def leave(self):
        self.__exit__()


def take(resources, kind, resource):
    if kind == "enter":
        resources.enter_context(resource)
    elif kind == "push":
        resources.push(resource)
    else:
        resources.callback(resource.leave)


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.booleans()), max_size=8))
def test_resources_are_released_in_reverse_order_although_releases_fail(taken):
    environment, log = BaseEnvironment(), []
    for number, (kind, fails) in enumerate(taken):
        take(environment.resources, kind, Resource(log, number, fails))
    del log[:]
    failing = [number for number, (_, fails) in enumerate(taken) if fails]
    if failing:
        with pytest.raises(OSError, match=f"^{failing[0]}$"):
            environment.close()
    else:
        environment.close()
    assert log == [f"-{number}" for number in reversed(range(len(taken)))]
    environment.close()
    assert len(log) == len(taken), "closing again does nothing"


@pytest.mark.parametrize("kind", KINDS)
def test_a_resource_that_is_added_after_close_is_released_at_once(kind):
    resources, log = Resources(), []
    resources.close()
    resource = Resource(log, "late", False)
    with pytest.raises(RuntimeError, match="the episode is over"):
        take(resources, kind, resource)
    assert log == ["+late", "-late"]


def test_a_context_that_is_entered_during_close_is_exited():
    resources, log = Resources(), []

    @contextmanager
    def slow():
        log.append("+slow")
        resources.close()  # the time limit of the episode was reached meanwhile
        yield
        log.append("-slow")

    with pytest.raises(RuntimeError, match="the episode is over"):
        resources.enter_context(slow())
    assert log == ["+slow", "-slow"]


def test_a_class_that_never_calls_init_has_resources():
    class Bare(BaseEnvironment):
        def __init__(self):
            pass

    first, second = Bare(), Bare()
    assert first.resources is first.resources is not second.resources
    first.close()
    second.close()


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def settle(condition):
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def opened():
    return open(os.devnull)


def temporary(folder):
    return NamedTemporaryFile(dir=folder)


class Sandbox(ToolEnvironment):
    """Acquires two descriptors and a file, and fails in the way of `fate`."""

    folder = ""

    def __init__(self, fate, max_turns=5):
        super().__init__(max_turns, tool_timeout=0.002)
        self.fate = fate

    def reset(self, row=None):
        super().reset(row)
        self.over = threading.Event()
        self.resources.callback(self.over.set)
        # The file is one resource with its removal, since the time limit may be reached between two of them.
        self.file = self.resources.enter_context(temporary(self.folder))
        if self.fate == "reset hangs":
            time.sleep(0.02)
            self.resources.enter_context(opened())
        if self.fate == "reset raises":
            raise UserError("no such row")
        if self.fate == "teardown fails":
            self.resources.callback(lambda: 1 / 0)
        self.null = self.resources.enter_context(opened())

    @tool
    def act(self) -> str:
        """Acts."""
        if self.fate == "tool raises":
            raise OSError("broken")
        if self.fate == "tool hangs":
            self.over.wait(10)
            self.resources.enter_context(opened())
        return "done"

    @tool
    async def wait(self) -> str:
        """Waits."""
        await asyncio.sleep(10 if self.fate == "async hangs" else 0)
        return "done"

    def answer(self, response, ground_truth):
        if self.fate == "answer raises":
            raise ValueError("wrong")
        if self.fate == "answer hangs":
            self.over.wait(10)
        return 1.0, None, True


FATES = [
    "fine", "reset hangs", "reset raises", "teardown fails", "tool raises", "tool hangs", "async hangs",
    "answer raises", "answer hangs",
]  # fmt: skip
CALLS = [{"id": "c", "function": {"name": name, "arguments": {}}} for name in ("act", "wait", "nothing")]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")
def test_a_thousand_episodes_leak_no_thread_descriptor_or_file(tmp_path):
    Sandbox.folder = str(tmp_path)
    failures = []

    async def episode(pool, number):
        environment = Sandbox(FATES[number % len(FATES)])
        # Only the fates that exceed a time limit get a short one, since the machine may be slow.
        limit = 0.01 if environment.fate in ("reset hangs", "answer hangs") else 30.0
        try:
            await pool.call(environment.reset, {}, timeout=limit)
            message = {"role": "assistant", "content": "", "tool_calls": CALLS}
            await pool.call(environment.respond, message, "", {}, timeout=30.0)
            await pool.call(environment.respond, {"role": "assistant", "content": ""}, "", {}, timeout=limit)
        except (UserError, ValueError, CallTimeoutError) as error:
            failures.append(type(error))
        finally:
            try:
                await pool.call(environment.close, timeout=30.0)
            except ZeroDivisionError as error:
                failures.append(type(error))

    async def run():
        pool = EnvironmentPool(8)
        slots = asyncio.Semaphore(8)

        async def one(number):
            async with slots:
                await episode(pool, number)

        await asyncio.gather(*(one(number) for number in range(1000)))
        pool.close()

    threads, before = threading.active_count(), descriptors()
    asyncio.run(asyncio.wait_for(run(), 300))
    assert {UserError, ValueError, CallTimeoutError, ZeroDivisionError} == set(failures)
    assert settle(lambda: threading.active_count() <= threads), threading.enumerate()
    assert settle(lambda: descriptors() <= before)
    assert settle(lambda: not os.listdir(tmp_path))
