"""Process groups of real processes, over gloo."""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import forked

LIMIT = 300.0
"""Time limit of the ranks, in seconds."""


def run_ranks(size: int, function: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    """Run `function(rank, *args)` on `size` ranks and return the results by rank, transferred by `torch.save`.

    `function` must be at the top of a module. A rank that raises fails the test with its traceback.
    """
    context = multiprocessing.get_context("forkserver")  # modules are imported once, in the fork server
    forked.begin()
    processes = [
        context.Process(target=_run, args=(rank, size, folder, function, args), daemon=True) for rank in range(size)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + LIMIT
    running = {process.sentinel for process in processes}
    while running and not list(folder.glob("*.failed")):
        ended = wait(running, end - time.monotonic())
        assert ended, f"{len(running)} of {size} ranks took longer than {LIMIT} s"
        running -= set(ended)
    for process in processes:
        process.kill()
        process.join()
    failures = [path.read_text() for path in sorted(folder.glob("*.failed"))]
    assert not failures, "\n".join(failures)
    assert not any(process.exitcode for process in processes), [process.exitcode for process in processes]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _run(rank: int, size: int, folder: Path, function: Callable[..., Any], args: tuple) -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT / 2))
    try:
        torch.save(function(rank, *args), folder / f"{rank}.pt")
    except BaseException:
        (folder / f"{rank}.failed").write_text(f"rank {rank}\n{traceback.format_exc()}")
    finally:
        dist.destroy_process_group()
