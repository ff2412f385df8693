"""Python's garbage collector, told what stays.

It looks at every object now and then, and torch and transformers bring half a million: a process with an event loop
stands still for 0.4 s each time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (10_000, 20, 50)
"""Objects made beyond those freed before the youngest are looked at, and how many such looks before the older ones are.
Python's own are 700, 10, 10."""


@contextmanager
def settled() -> Iterator[None]:
    """Meanwhile collections leave out all objects that exist now, and come less often."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
