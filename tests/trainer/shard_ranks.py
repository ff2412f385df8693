"""Small process groups over gloo, in forked processes that return their results by a queue."""

import faulthandler
import multiprocessing
import os
import queue as queues
import signal
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

FORK = multiprocessing.get_context("fork")


def on_ranks(count, folder, work, *arguments):
    """Return the result of `work(*arguments)` on each of `count` ranks; a rank that raises fails the test, and so does
    one that gives no answer, with the place in the code where it waits."""
    queue, store = FORK.Queue(), folder / f"store-{os.urandom(4).hex()}"
    ranks = [FORK.Process(target=_rank, args=(queue, r, count, store, work, arguments)) for r in range(count)]
    for rank in ranks:
        rank.start()
    try:
        answers = dict(queue.get(timeout=150) for _ in ranks)
    except queues.Empty:
        raise AssertionError("no answer after 150 s\n" + _places(ranks, store)) from None
    finally:
        for rank in ranks:
            rank.join(timeout=10)
            rank.kill()
    failures = [answer for answer in answers.values() if isinstance(answer, Failure)]
    assert not failures, "\n".join(failures)
    return [answers[rank] for rank in range(count)]


def _places(ranks, store):
    """Return the stack of each thread of each rank."""
    for rank in ranks:
        if rank.is_alive():
            os.kill(rank.pid, signal.SIGUSR1)
    time.sleep(1)
    return "\n".join(path.read_text() for path in sorted(store.parent.glob(f"{store.name}-stacks-*")))


class Failure(str):
    """Traceback of a rank that raised an error."""


def _rank(queue, rank, count, store, work, arguments):
    with open(f"{store}-stacks-{rank}", "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        _answer(queue, rank, count, store, work, arguments)


def _answer(queue, rank, count, store, work, arguments):
    torch.set_num_threads(1)
    try:
        where = {"init_method": f"file://{store}", "rank": rank, "world_size": count}
        dist.init_process_group("gloo", timeout=timedelta(seconds=100), **where)
        answer = work(*arguments)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answer = Failure(f"rank {rank}\n{traceback.format_exc()}")
    queue.put((rank, answer))
    queue.close()
    queue.join_thread()
    os._exit(0)
