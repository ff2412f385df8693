"""Sizes of the files of containers: real folders, processes that hold files without a name, and real containers."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from mtrl.sandbox import container_files as module
from mtrl.sandbox import disk_watch, engine_container
from mtrl.sandbox.container import ContainerLimits
from mtrl.sandbox.container_files import (
    container_files,
    folder_size,
    may_measure,
    processes_in,
    share_open_files,
    unnamed_size,
    upper_folder,
)
from mtrl.sandbox.engine_container import EngineContainer
from tests.container_root import ENGINES, IMAGE, need_engine

SIZE = 2**20
HOLD = """
import ctypes, mmap, os, sys, threading

def nameless(path, size):
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    os.write(file, b"x" * size)
    os.unlink(path)
    return file

def own_files():
    ctypes.CDLL(None).unshare(0x400)  # CLONE_FILES: this thread gets open files of its own
    nameless("by-a-thread", 4 * SIZE)
    held.set()
    threading.Event().wait()

SIZE = int(sys.argv[1])
held = threading.Event()
one = nameless("open", SIZE)
again = os.dup(one)
two = nameless("mapped", 2 * SIZE)
memory = mmap.mmap(two, 2 * SIZE)
os.close(two)
named = open("named", "wb")
named.write(b"x" * SIZE)
named.flush()
other = os.memfd_create("in memory")
os.write(other, b"x" * SIZE)
threading.Thread(target=own_files, daemon=True).start()
held.wait()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds 1, 2 and 4 MiB without a name: open, in its memory, and open in a thread alone."""
    command = [sys.executable, "-c", HOLD, str(SIZE)]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
        process.stdin.close()


def test_files_without_a_name_count_once(holder, tmp_path):
    devices = frozenset({os.stat(tmp_path / "named").st_dev})
    assert 7 * SIZE <= unnamed_size([holder, holder], devices, 60) < 8 * SIZE
    assert unnamed_size([holder], frozenset(), 60) == 0, "files of other devices, such as those in memory, do not count"
    assert unnamed_size([2**22 + 1], devices, 60) == 0, "no such process"


def test_only_regular_files_count(tmp_path):
    """A folder that was removed while it is open takes up space too, and no command can write into it."""
    (tmp_path / "gone").mkdir()
    folder = os.open(tmp_path / "gone", os.O_RDONLY)
    try:
        (tmp_path / "gone").rmdir()
        assert unnamed_size([os.getpid()], frozenset({os.fstat(folder).st_dev}), 60) == 0
    finally:
        os.close(folder)


def test_files_that_are_not_found_in_time_do_not_count(holder, tmp_path):
    assert unnamed_size([holder], frozenset({os.stat(tmp_path / "named").st_dev}), -1.0) == 0


def test_a_table_of_open_files_that_threads_share_is_read_once(holder, tmp_path, monkeypatch):
    """One of the threads has a table of its own, and no process of the test shares one with the other."""
    threads = sorted(int(name) for name in os.listdir(f"/proc/{holder}/task"))
    shared = [share_open_files(holder, thread) for thread in threads]
    if not any(shared):
        pytest.skip("this machine has no kcmp, so the table of every thread is read")
    assert shared == [True, False] and not share_open_files(holder, os.getpid())
    read = []
    entries = module.entries_of
    monkeypatch.setattr(module, "entries_of", lambda folder: read.append(folder) or entries(folder))
    unnamed_size([holder, holder], frozenset(), 60)
    assert [name for name in read if name.endswith("/fd")] == [f"/proc/{holder}/task/{each}/fd" for each in threads]


def test_sizes_of_folders(tmp_path):
    """Files below a folder count, whatever their names are, and a folder may be gone."""
    (tmp_path / "one" / "a\n9\tb").mkdir(parents=True)
    (tmp_path / "one" / "a\n9\tb" / "file").write_bytes(b"x" * 50_000)
    assert 50_000 <= folder_size(str(tmp_path / "one"), 60) < 100_000 and folder_size(str(tmp_path / "gone"), 60) == 0


def test_the_upper_folder_of_a_root():
    line = "77 1 0:1 / {} rw - overlay overlay rw,lowerdir=/l:/m,upperdir={},workdir=/w\n"
    assert upper_folder(line.format("/etc", "/etc") + line.format("/", "/var/up")) == "/var/up"
    assert upper_folder(line.format("/etc", "/etc")) is None
    assert upper_folder(line.format("/", r"/tmp/a\040b/up")) is None, "the name of another folder begins this one"


def test_a_process_that_is_not_that_of_the_container_is_not_measured(holder):
    """The number that an engine on another machine names belongs to any process of this one."""
    assert container_files(holder, "0123" * 16) is None and container_files(2**22 + 1, "0123" * 16) is None


def test_a_user_who_may_not_measure_asks_no_engine(tmp_path, monkeypatch):
    program = tmp_path / "docker"
    program.write_text("#!/bin/bash\necho $* >> $0.calls\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(engine_container, "may_measure", lambda: False)
    container = EngineContainer("docker", IMAGE, ContainerLimits(disk_mb=16))
    assert container.files() is None and not (tmp_path / "docker.calls").exists()
    monkeypatch.setattr(engine_container, "may_measure", lambda: True)
    assert container.files() is None and (tmp_path / "docker.calls").exists()


HIDE = "for i in {1..200}; do exec {file}> hidden; rm hidden; head -c 1000000 /dev/zero >&$file; sleep 0.05; done"
NESTED = f"unshare -Urm true || exec bash -c '{HIDE}'; exec unshare -Urm bash -c '{HIDE}'"
"""The same in a mount namespace of its own, where the container permits one, as Podman's does."""


@pytest.mark.skipif(not may_measure(), reason="only root may read the files of all containers")
@pytest.mark.parametrize("command", [HIDE, NESTED], ids=["open", "nested"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_container_that_hides_its_files_is_removed(engine, command, tmp_path, monkeypatch):
    """Files that a command has removed and holds open count, though `du` and the engine do not see them."""
    need_engine(engine, tmp_path)
    monkeypatch.setattr(disk_watch, "engine_sizes", None)
    container = EngineContainer(engine, IMAGE, replace(ContainerLimits(memory="64m"), disk_mb=16), cwd="/app")
    try:
        container.start()
        mine = container.run("echo $$; sleep 0.1; cat /proc/1/cmdline", 20).output
        assert container.name not in mine, "the text that a command sees is another one in each episode"
        assert len(processes_in(container.files().cgroup)) == 2, "bash and sleep"
        assert "exceeded 16 MiB" in container.run(command, 60).stopped
    finally:
        container.remove()
