"""Watches of the files of containers: real folders, and programs in place of an engine."""

import os
import signal
import threading
import warnings
from functools import partial

import pytest

from mtrl.sandbox import disk_watch
from mtrl.sandbox.container_files import ContainerFiles
from mtrl.sandbox.disk_watch import DiskWatch, WatchedContainer, parse_sizes
from tests.sandbox.swerex_servers import until


def watching():
    """Return the threads that look at the sizes of files."""
    return [thread for thread in threading.enumerate() if thread.name == "mtrl-disk-watch"]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Files above every limit of these tests, which no process holds open."""
    monkeypatch.setattr(disk_watch, "PAUSE", 0.02)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_bytes(b"x" * 50_000)
    return ContainerFiles(str(tmp_path / "full"), frozenset(), "mtrl-no-such-group")


def test_sizes_of_containers_are_read_in_the_words_of_the_engines():
    printed = "a 0B (virtual 6.48MB)\nb 1.09kB (virtual 7MB)\nc 50MB\nd 1.5GB (virtual 2GB)\ne 2TB\n\nf \n"
    assert parse_sizes(printed) == {"a": 0, "b": 1090, "c": 50_000_000, "d": 1_500_000_000, "e": 2 * 10**12}


def test_a_container_is_stopped_until_it_is_gone_and_holds_up_no_other(files):
    """The first two calls fail, and a call that lasts delays no other container."""
    calls, hangs, other = [], threading.Event(), threading.Event()

    def stop():
        calls.append(len(calls))
        if len(calls) == 1:
            raise OSError("no memory")
        return len(calls) == 3

    watch = DiskWatch("false")
    watch.add("lasting", WatchedContainer(1, files, lambda: hangs.wait(60)))
    watch.add("failing", WatchedContainer(1, files, stop))
    until(lambda: len(calls) == 3)
    watch.add("later", WatchedContainer(1, files, lambda: other.set() is None))
    assert other.wait(60)
    hangs.set()
    until(lambda: not watching())
    assert calls == [0, 1, 2], "a container that is gone is not stopped again"
    other.clear()
    watch.add("after the end of the thread", WatchedContainer(1, files, lambda: other.set() is None))
    assert other.wait(60)


def test_containers_are_watched_after_a_lack_of_threads(files, monkeypatch):
    start, missing, stopped = threading.Thread.start, [], threading.Event()

    def fail(thread):
        if len(missing) < 3 and (thread.name == "mtrl-disk-watch" or threading.current_thread() in watching()):
            missing.append(thread.name)
            if len(missing) != 2:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)
    watch = DiskWatch("false")
    container = WatchedContainer(1, files, lambda: stopped.set() is None)
    with pytest.raises(RuntimeError, match="new thread"):
        watch.add("first", container)
    watch.add("second", container)  # the thread of its removal cannot be started the first time
    assert stopped.wait(60) and len(missing) == 3
    until(lambda: not watching())


ENGINE = """#!/bin/bash
case "$*" in *--size*) echo "large 3MB (virtual 9MB)"; echo "small 1kB"; echo "not-watched 9MB" ;; esac
"""


def test_a_container_that_cannot_be_measured_in_time_is_measured_by_the_engine(files, tmp_path, monkeypatch):
    """A measurement that does not end does not remove a container by itself."""
    monkeypatch.setattr(disk_watch, "ROUND_SECONDS", 1e-6)
    engine = tmp_path / "engine"
    engine.write_text(ENGINE)
    engine.chmod(0o755)
    stopped = []
    watch = DiskWatch(str(engine))
    for name in ("unknown", "small", "large"):
        watch.add(name, WatchedContainer(2 * 10**6, files, partial(lambda name: stopped.append(name) is None, name)))
    until(lambda: stopped)
    watch.discard("unknown")
    watch.discard("small")
    until(lambda: not watching())
    assert stopped == ["large"]


def test_an_engine_that_fails_is_reported_once_for_each_reason(files, tmp_path, caplog):
    engine = tmp_path / "engine"
    sizes = f"echo look >> {tmp_path}/looks; echo first >&2; echo the reason >&2; exit 3"
    engine.write_text(f'#!/bin/bash\ncase "$*" in *--size*) {sizes} ;; esac\n')  # the supervisor finds no container
    engine.chmod(0o755)
    watch = DiskWatch(str(engine))
    watch.add("one", WatchedContainer(1, None, lambda: True))
    until(lambda: (tmp_path / "looks").exists() and (tmp_path / "looks").read_text().count("look") > 2)
    watch.discard("one")
    until(lambda: not watching())
    (warning,) = caplog.messages
    assert warning.endswith("cannot be measured: the reason")


def test_a_forked_process_has_a_lock_of_its_own():
    with disk_watch.watches_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of Python warn of threads
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            disk_watch.disk_watch("program")
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
