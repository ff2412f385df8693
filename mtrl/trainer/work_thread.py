"""Execution of the trainer's work: directly, or in a thread beside the rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class WorkThread:
    """Executes one function at a time.

    With `beside_rollouts`, functions run in a separate thread, always the same one, so that the event loop can serve
    episodes meanwhile. Without it, they run in the calling thread.
    """

    def __init__(self, beside_rollouts: bool):
        self._thread = ThreadPoolExecutor(1, "learner", like_this_thread()) if beside_rollouts else None

    async def do(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `work` and return its result."""
        if self._thread is None:
            return work(*args, **kwargs)
        return await asyncio.wrap_future(self._thread.submit(work, *args, **kwargs))

    def close(self) -> None:
        """Wait for the current function and end the thread."""
        if self._thread:
            self._thread.shutdown()


def like_this_thread() -> Callable[[], None]:
    """Return a function that gives another thread this thread's GPU and number of CPU threads, which PyTorch stores per
    thread."""
    import torch

    threads = torch.get_num_threads()
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def begin() -> None:
        torch.set_num_threads(threads)
        if device is not None:
            torch.cuda.set_device(device)

    return begin
