"""The heap of the C library: free memory between tensors is returned to the system."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mtrl.utils.heap import GROWTH, LARGE, Heap

HOLES = """
import json
import numpy as np
from mtrl.utils.heap import LARGE, Heap, resident_memory

heap = Heap(LARGE)

np.ones(31 * 2**17)  # when it is freed, glibc takes arrays of up to 31 MiB from its heap
arrays = [np.ones(2**17) for _ in range(384)]  # 1 MiB each
del arrays[::2]
sizes = [resident_memory()]
heap.trim()
sizes.append(resident_memory())
held = [np.ones(2**17) for _ in range(32)]  # less than a trim waits for
del held
heap.trim()
sizes.append(resident_memory())
assert all(array.sum() == 2**17 for array in arrays)
print(json.dumps([size / 2**20 for size in sizes]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_free_memory_between_arrays_is_returned():
    done = subprocess.run([sys.executable, "-c", HOLES], check=True, capture_output=True, text=True, timeout=60)
    before, after, later = json.loads(done.stdout)
    assert before - after > 180  # of 192 MiB
    assert later - after > 24  # 32 MiB of free memory do not start another trim


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr("mtrl.utils.heap.ctypes.CDLL", lambda _: object())
    Heap(LARGE).trim()


def test_a_trim_waits_until_the_process_has_grown(monkeypatch):
    calls, resident = [], [5 * GROWTH]
    monkeypatch.setattr("mtrl.utils.heap.ctypes.CDLL", lambda _: SimpleNamespace(malloc_trim=calls.append))
    heap, small = Heap(LARGE), Heap(LARGE - 1)
    monkeypatch.setattr("mtrl.utils.heap.resident_memory", lambda: resident[0])
    heap.trim()
    resident[0] += GROWTH - 1
    heap.trim()
    assert len(calls) == 1
    resident[0] += 1
    heap.trim()
    assert len(calls) == 2
    small.trim()
    assert len(calls) == 2
    resident[0] -= 2 * GROWTH  # freed memory, which the next growth is compared with
    heap.trim()
    resident[0] += GROWTH
    heap.trim()
    assert len(calls) == 3
