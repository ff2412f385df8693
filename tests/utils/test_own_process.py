"""The cores of this process, and contexts for its garbage collector."""

import os
import subprocess
import sys

from mtrl.utils.process import usable_cores

NODE = """
import gc, weakref
from mtrl.utils.process import collect_rarely, settled

class Node:
    def __init__(self):
        self.me = self

before = gc.get_threshold()
"""
RESTORED = "assert gc.get_threshold() == before and gc.get_freeze_count() == 0"


def execute(*lines):
    """Execute the lines in a process of its own: in this one, tests/conftest.py has frozen objects."""
    subprocess.run([sys.executable, "-c", NODE + "\n".join(lines)], check=True, timeout=120)


def test_only_later_objects_are_collected():
    execute(
        "old = Node()",
        "stored = weakref.ref(old)",
        "with settled():",
        "    del old",
        "    new = Node()",
        "    collected = weakref.ref(new)",
        "    del new",
        "    gc.collect()",
        "    assert collected() is None",
        "    assert stored() is not None",
        "    assert gc.get_freeze_count() > 0",
        "gc.collect()",
        "assert stored() is None",
        RESTORED,
    )


def test_settings_are_restored_after_an_error():
    execute("try:", "    with settled(): 1 / 0", "except ZeroDivisionError:", f"    {RESTORED}", "else:", "    exit(1)")


def test_objects_that_were_frozen_before_remain_frozen():
    execute(
        "old = Node()",
        "stored = weakref.ref(old)",
        "gc.freeze()",
        "with settled():",
        "    del old",
        "gc.collect()",
        "assert stored() is not None and gc.get_threshold() == before",
    )


def test_a_program_that_has_started_collects_rarely():
    execute(
        "made = lambda: sum(stage['collections'] for stage in gc.get_stats())",
        "collect_rarely()",
        "first = made()",
        "kept = [[] for _ in range(500_000)]",
        "assert made() - first <= 11",
    )


def test_only_cores_of_the_affinity_count(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {5, 6, 7})
    assert usable_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cores() == 128
