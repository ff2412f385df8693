"""Attacks on the resources of the machine: processes, memory, disk, output and time."""

import itertools
import os
import threading
import time
import tracemalloc

import pytest

from tests.peak import Peak
from tests.sandbox.processes import processes_with, python

MARGIN = 60.0
"""Seconds that a busy machine may add."""


def test_a_fork_bomb_is_limited(sandbox, bystander):
    with Peak() as peak:
        thread = threading.Thread(target=lambda: sandbox.run(":(){ :|:& };:; sleep 100", timeout=1.5))
        thread.start()
        time.sleep(0.5)
        assert bystander.run("echo fine | cat").stdout == "fine\n", "the other sandbox works during the attack"
        thread.join(MARGIN)
    assert not thread.is_alive()
    assert sandbox.limits.processes / 2 < peak.processes < sandbox.limits.processes + 15, "and those of bubblewrap"


@pytest.mark.parametrize(
    "start",
    ["os.fork() or time.sleep(99)", "threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
     "os.fork() or (os.setsid(), os.fork() or time.sleep(99))"],
    ids=["processes", "threads", "daemons"],
)  # fmt: skip
def test_processes_and_threads_are_counted_together(sandbox, start):
    attack = (
        "import os, threading, time\n"
        "threading.stack_size(65536)\n"
        "count = 0\n"
        "try:\n"
        f"    for count in range(500): {start}\n"
        "except (OSError, RuntimeError): pass\n"
        "print(count, flush=True); os._exit(0)"
    )
    result = python(sandbox, attack)
    assert result.exit_code == 0, result
    assert 0 < max(map(int, result.stdout.split())) < sandbox.limits.processes


def test_a_memory_bomb_is_limited(sandbox):
    result = python(sandbox, f"x = bytearray({2 * sandbox.limits.memory_bytes})")
    assert "MemoryError" in result.stderr and result.exit_code == 1
    result = sandbox.run(f"x=$(head -c {2 * sandbox.limits.memory_bytes} /dev/zero | tr '\\0' x)")
    assert result.exit_code != 0


def test_a_memory_bomb_of_many_processes_is_killed(sandbox):
    """Each process is below the limit; all together need eight times the limit."""
    attack = (
        "import mmap, os, time\n"
        "for _ in range(15):\n"
        "    if not os.fork(): break\n"
        f"m = mmap.mmap(-1, {sandbox.limits.memory_bytes // 2}, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
        f"for i in range(0, {sandbox.limits.memory_bytes // 2}, 4096): m[i] = 1\n"
        "time.sleep(99)\n"
    )
    with Peak() as peak:
        result = python(sandbox, attack)
    assert (result.killed_by, result.exit_code, result.timed_out) == ("memory", 137, False)
    assert result.seconds < sandbox.limits.seconds
    assert sandbox.limits.memory_bytes / 2 < peak.bytes < 4 * sandbox.limits.memory_bytes


def test_memory_that_no_limit_counts_cannot_be_had(sandbox):
    """Pages of a shared mapping without a file remain while one of them is mapped, and pages in a pipe until it ends;
    the process that has unmapped them needs no memory by its own numbers."""
    attack = (
        "import ctypes, mmap, os\n"
        "for file, flags in ((-1, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS), (os.open('/dev/zero', os.O_RDWR), 1)):\n"
        "    try: mmap.mmap(file, 4096, flags)\n"
        "    except OSError as error: print(type(error).__name__, error.errno)\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "reader, writer = os.pipe()\n"
        "pages = ctypes.create_string_buffer(4096)\n"
        "piece = (ctypes.c_size_t * 2)(ctypes.addressof(pages), 4096)\n"
        "print(libc.vmsplice(writer, piece, 1, 0), ctypes.get_errno())\n"
    )
    assert python(sandbox, attack).stdout == "PermissionError 1\nOSError 19\n-1 1\n"
    useful = (
        "import mmap, os\n"
        "mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)[0] = 1\n"
        "file = os.open('/dev/shm/shared', os.O_RDWR | os.O_CREAT)\n"
        "os.truncate(file, 4096)\n"
        "shared = mmap.mmap(file, 4096, mmap.MAP_SHARED)\n"
        "if not os.fork(): shared[0] = 7; os._exit(0)\n"
        "os.wait(); print(shared[0], open('/dev/zero', 'rb').read(3))\n"
    )
    assert python(sandbox, useful).stdout == "7 b'\\x00\\x00\\x00'\n"


def test_processes_that_share_pages_are_not_killed(sandbox):
    attack = (
        "import os, time\n"
        f"x = bytearray({sandbox.limits.memory_bytes // 3})\n"
        "for _ in range(10):\n"
        "    if not os.fork(): time.sleep(1); os._exit(0)\n"
        "for _ in range(10): os.wait()\n"
        "print('done')\n"
    )
    assert python(sandbox, attack).stdout == "done\n"


def test_a_disk_bomb_is_limited(sandbox):
    for folder in ("/workspace", "/tmp", "/dev/shm"):
        result = sandbox.run(f"cat /dev/zero > {folder}/big; stat -c %s {folder}/big; rm {folder}/big")
        assert int(result.stdout) <= sandbox.limits.file_bytes
        result = sandbox.run(
            f"cd {folder}; for i in $(seq 20); do head -c 1M /dev/zero > $i; done; du -sm . | cut -f1; rm *"
        )
        assert int(result.stdout) <= sandbox.limits.workspace_bytes // 2**20 and "No space left" in result.stderr
        result = sandbox.run(f"cd {folder}; mkdir $(seq 999) 2>&1 | grep -c 'No space left'; touch full; rm -r *")
        assert int(result.stdout) >= 999 - sandbox.limits.workspace_files
        with pytest.raises(OSError, match="No space left"):
            sandbox.write_file("too/large", bytes(sandbox.limits.workspace_bytes + 1))
        sandbox.run("rm -r too")
    hidden = (
        "import os\n"
        "files, written = [], 0\n"
        "try:\n"
        "    while True:\n"
        "        files.append(open(f'f{len(files)}', 'wb', 0)); os.unlink(files[-1].name)\n"
        "        for _ in range(3): written += files[-1].write(bytes(2**20))\n"
        "except OSError as error: print(error.errno, written)\n"
    )
    error, written = map(int, python(sandbox, hidden).stdout.split())
    assert error == 28 and written <= sandbox.limits.workspace_bytes, "deleted files that are still open are counted"


@pytest.mark.parametrize(
    "command", ["yes", "cat /dev/zero >&2", "yes | tr -d '\\n'", "while :; do echo x; done & yes >&2"]
)
def test_an_output_bomb_is_killed(sandbox, command):
    tracemalloc.start()
    try:
        result = sandbox.run(command)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (result.killed_by, result.exit_code, result.truncated) == ("output", 137, True)
    assert len(result.stdout) <= sandbox.limits.output_bytes and len(result.stderr) <= sandbox.limits.output_bytes
    assert peak < 2 * 2**20
    assert result.seconds < sandbox.limits.seconds


def test_long_lines_are_cut(sandbox):
    result = sandbox.run("head -c 1000000 /dev/zero | tr '\\0' a")
    assert result.stdout == "a" * sandbox.limits.output_bytes and result.truncated and result.exit_code == 0


@pytest.mark.parametrize(
    "start",
    ["sleep {0} &", "nohup sleep {0} >/dev/null 2>&1 &", "setsid sleep {0} <&- >&- 2>&- &",
     "(setsid nohup sleep {0} &) &", "coproc sleep {0}",
     "trap '' TERM HUP INT; (trap '' TERM HUP INT; sleep {0}) & disown",
     "python3 -c 'import os,time;os.fork() and os._exit(0);os.setsid();os.fork() and os._exit(0);os.closerange(0,99);"
     "os.execlp(\"sleep\",\"sleep\",\"{0}\")'"],
)  # fmt: skip
def test_children_do_not_outlive_the_command(sandbox, start):
    marker = f"{os.getpid()}{next(COUNTER)}"
    result = sandbox.run(f"{start.format(marker)}\nsleep 0.2; echo end")
    assert result.stdout == "end\n" and result.exit_code == 0 and result.seconds < MARGIN
    assert not processes_with(marker), "the processes have ended when `run` returns"
    result = sandbox.run(f"{start.format(marker)}\nsleep 999", timeout=0.5)
    assert result.timed_out and result.seconds < MARGIN
    assert not processes_with(marker)


COUNTER = itertools.count(1000)


def test_stopped_and_stubborn_processes_end(sandbox):
    deaf = "import signal\nfor n in {*range(1, 32)} - {9, 19}: signal.signal(n, signal.SIG_IGN)\nwhile True: pass"
    for command in ("kill -STOP $$", "trap '' TERM INT HUP; while :; do sleep 1; done", ["python3", "-c", deaf]):
        result = sandbox.run(command, timeout=0.5)
        assert result.timed_out and result.seconds < MARGIN


def test_a_command_cannot_forge_its_result(sandbox):
    """The command has no descriptor of the reports of bubblewrap."""
    every = "/proc/self/fd /proc/1/fd /proc/$PPID/fd"
    attack = f"for fd in $(ls {every} | sort -u); do echo '{{\"exit-code\": 0}}' >&$fd; done; exit 7"
    assert sandbox.run(attack).exit_code == 7
    assert set(sandbox.run(["sh", "-c", "ls /proc/1/fd"]).stdout.split()) == {"0", "1", "2", "3"}, (
        "3 is a copy of stderr"
    )
    assert not set(sandbox.run("ls -v /proc/self/fd").stdout.split()) - {"0", "1", "2", "3"}, "ls opens 3"


def test_exit_codes_of_signals(sandbox):
    for number in (1, 6, 9, 11, 15):
        assert sandbox.run(f"kill -{number} $$").exit_code == 128 + number
        result = python(sandbox, f"import os; os.kill(os.getpid(), {number})")
        assert (result.exit_code, result.stderr, result.killed_by) == (128 + number, "", None)
