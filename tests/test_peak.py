"""`Peak` counts the memory of started programs, and not that of a child that has not begun its program."""

import os
import subprocess
import sys
import time

from tests.peak import Peak

MEGABYTE = 2**20
WAIT = 0.3
"""Seconds for several samples, which are 20 ms apart."""


def test_memory_of_a_started_program():
    program = f"x = bytearray(100 * {MEGABYTE}); print(flush=True); input()"
    command = [sys.executable, "-c", program]
    with Peak() as peak, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        deadline = time.monotonic() + 60
        while peak.bytes < 100 * MEGABYTE and time.monotonic() < deadline:
            time.sleep(WAIT)
        child.communicate(b"\n")
    assert 100 * MEGABYTE <= peak.bytes < 150 * MEGABYTE and peak.processes == 1


def test_no_memory_of_a_child_before_its_program():
    block = b"x" * (100 * MEGABYTE)
    with Peak() as peak:
        if (child := os.fork()) == 0:
            time.sleep(WAIT)
            os._exit(0)
        os.waitpid(child, 0)
    assert peak.processes == 1 and peak.bytes == 0 and len(block) == 100 * MEGABYTE
