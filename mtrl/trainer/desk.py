"""Where the learning is done: at once, or in a thread beside the rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Desk:
    """Does one piece of work at a time.

    Beside rollouts it works in a thread of its own, always the same one, so that the event loop goes on serving
    episodes. Where nothing is played meanwhile, work is done where it is asked for.
    """

    def __init__(self, beside_rollouts: bool):
        self._thread = ThreadPoolExecutor(1, "learner", _like_this_thread()) if beside_rollouts else None

    async def do(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` returns or raises."""
        if self._thread is None:
            return work(*args, **kwargs)
        return await asyncio.wrap_future(self._thread.submit(work, *args, **kwargs))

    def close(self) -> None:
        """Wait for what is being done, and do nothing more."""
        if self._thread:
            self._thread.shutdown()


def _like_this_thread() -> Callable[[], None]:
    """Gives another thread this one's GPU and number of threads, which PyTorch keeps per thread."""
    import torch

    threads = torch.get_num_threads()
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def begin() -> None:
        torch.set_num_threads(threads)
        if device is not None:
            torch.cuda.set_device(device)

    return begin
