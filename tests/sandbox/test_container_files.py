"""Sizes of the files of containers: real folders, processes that hold files without a name, and real containers."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from mtrl.sandbox import container_files as module
from mtrl.sandbox import disk_watch
from mtrl.sandbox.container import ContainerLimits
from mtrl.sandbox.container_files import (
    container_files,
    folder_size,
    processes_by_namespace,
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
    assert 7 * SIZE <= unnamed_size([holder, holder], devices) < 8 * SIZE
    assert unnamed_size([holder], frozenset()) == 0, "files of other devices, such as those in memory, do not count"
    assert unnamed_size([2**22 + 1], devices) == 0, "no such process"


def test_too_many_files_to_measure_in_time(holder, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MEASURE_SECONDS", -1.0)
    assert unnamed_size([holder], frozenset()) is None


def test_processes_are_found_by_their_mount_namespace(holder):
    own = next(numbers for numbers in processes_by_namespace().values() if os.getpid() in numbers)
    assert holder in own


def test_sizes_of_folders(tmp_path):
    """Files below a folder count, whatever their names are, and a folder may be gone."""
    (tmp_path / "one" / "a\n9\tb").mkdir(parents=True)
    (tmp_path / "one" / "a\n9\tb" / "file").write_bytes(b"x" * 50_000)
    assert 50_000 <= folder_size(str(tmp_path / "one")) < 100_000 and folder_size(str(tmp_path / "gone")) == 0


def test_the_upper_folder_of_a_root():
    line = "77 1 0:1 / {} rw - overlay overlay rw,lowerdir=/l:/m,upperdir={},workdir=/w\n"
    assert upper_folder(line.format("/etc", "/etc") + line.format("/", "/var/up")) == "/var/up"
    assert upper_folder(line.format("/etc", "/etc")) is None
    assert upper_folder(line.format("/", r"/tmp/a\040b/up")) is None, "the name of another folder begins this one"


def test_a_process_that_is_not_that_of_the_container_is_not_measured(holder):
    """The number that an engine on another machine names belongs to any process of this one."""
    assert container_files(holder, "mtrl-0123") is None and container_files(2**22 + 1, "mtrl-0123") is None


HIDE = "for i in {1..200}; do exec {file}> hidden; rm hidden; head -c 1000000 /dev/zero >&$file; sleep 0.05; done"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may read the files of all containers")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_container_that_hides_its_files_is_removed(engine, tmp_path, monkeypatch):
    """Files that a command has removed and holds open count, though `du` and the engine do not see them."""
    need_engine(engine, tmp_path)
    monkeypatch.setattr(disk_watch, "engine_sizes", None)
    container = EngineContainer(engine, IMAGE, replace(ContainerLimits(memory="64m"), disk_mb=16), cwd="/app")
    try:
        container.start()
        assert "exceeded 16 MiB" in container.run(HIDE, 60).stopped
    finally:
        container.remove()
