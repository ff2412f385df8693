"""Settings of Python's garbage collector for a process with an event loop.

A full collection examines every object, and torch and transformers create half a million of them, so that each full
collection stops the event loop for 0.4 s.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (10_000, 20, 50)
"""Thresholds for `gc.set_threshold`: the number of allocations minus deallocations that starts a collection of the
youngest generation, then the number of collections of each generation before the next older one is collected. Python's
defaults are 700, 10, 10."""


@contextmanager
def settled() -> Iterator[None]:
    """Within this context, collections skip all objects that existed at its start, and run less often."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
