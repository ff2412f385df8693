"""The separate group for weights: tensors arrive unchanged, and waits for a lost member are short."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from mtrl.distributed.broadcast import broadcast, buckets, connect, flatten, join_group, leave, open_store, receive
from tests import forked

HOST = "127.0.0.1"

SGLANG = '''
import sys, torch, torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world, rendezvous
port, limit = sys.argv[1], __import__("datetime").timedelta(seconds=30)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
# As sglang/srt/utils/common.py has it: init_custom_process_group.
store, rank, size = next(rendezvous(f"tcp://127.0.0.1:{port}", 1, 2, timeout=limit))
store.set_timeout(limit)
store = PrefixStore("weights", store)
group, _ = _new_process_group_helper(size, rank, [], Backend("gloo"), store, group_name="weights",
                                     backend_options=None, timeout=limit, device_id=None)
_world.pg_group_ranks[group] = {i: i for i in range(size)}
for size in (12, 6):
    flat = torch.empty(size, dtype=torch.uint8)
    dist.broadcast(flat, src=0, group=group)
    print(flat.tolist())
'''  # fmt: skip

MEMBER = """
import os, signal, sys, time
from mtrl.distributed.broadcast import join_group, receive
group = join_group("gloo", "127.0.0.1", int(sys.argv[1]), 2, 1, "weights", 30)
print(receive(group, ["float32"], [[3]], "cpu", 30)[0].tolist(), flush=True)
os.kill(os.getpid(), int(sys.argv[2]))
time.sleep(60)
"""


@contextmanager
def process(code, *arguments, start=forked.Popen):
    child = start(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


@contextmanager
def pair(timeout=10.0):
    """Join both ranks in this process."""
    store = open_store(HOST, timeout)
    other = []
    thread = threading.Thread(
        target=lambda: other.append(join_group("gloo", HOST, store.port, 2, 1, "weights", timeout))
    )
    thread.start()
    first = join_group("gloo", HOST, store.port, 2, 0, "weights", timeout)
    thread.join()
    try:
        yield first, other[0]
    finally:
        leave(first)
        leave(other[0])


def test_tensors_of_all_types_arrive_bit_by_bit():
    sent = [torch.randn(5, 3), torch.ones(0), torch.tensor(2.5), torch.randn(2, 2).t(), torch.randn(7).bfloat16()]
    with pair() as (ours, theirs):
        thread = threading.Thread(target=broadcast, args=(ours, sent, 10.0))
        thread.start()
        dtypes = [str(value.dtype).removeprefix("torch.") for value in sent]
        came = receive(theirs, dtypes, [value.shape for value in sent], "cpu", 10.0)
        thread.join()
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(sent, came, strict=True))
    assert not dist.is_initialized()


def test_the_group_is_compatible_with_sglangs():
    store = open_store(HOST, 30.0)
    with process(SGLANG, store.port) as child:
        group = join_group("gloo", HOST, store.port, 2, 0, "weights", 30.0)
        for values in (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1, 2, 3], dtype=torch.bfloat16)):
            broadcast(group, [values], 30.0)
        out, _ = child.communicate(timeout=30)
        leave(group)
    expected = [
        flatten([torch.tensor([1.0, 2.0, 3.0])]).tolist(),
        flatten([torch.ones(3).cumsum(0).bfloat16()]).tolist(),
    ]
    assert [line for line in out.splitlines()] == [str(line) for line in expected]


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_a_member_that_dies_or_hangs_ends_the_broadcast(fate):
    store = open_store(HOST, 30.0)
    with process(MEMBER, store.port, int(fate)) as child:
        group = join_group("gloo", HOST, store.port, 2, 0, "weights", 30.0)
        broadcast(group, [torch.ones(3)], 30.0)
        assert child.stdout.readline() == "[1.0, 1.0, 1.0]\n"
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            broadcast(group, [torch.zeros(30_000_000)], 2.0)  # more than the buffer of a socket
        assert time.monotonic() - began < 20
        leave(group)
        with pytest.raises(RuntimeError, match="left"):
            broadcast(group, [torch.ones(3)], 2.0)


def test_joining_ends_when_others_are_missing_or_the_store_is_closed():
    store = open_store(HOST, 1.0)
    with pytest.raises(RuntimeError):
        join_group("gloo", HOST, store.port, 2, 0, "a", 1.0)
    own, ends = connect(HOST, store.port, 60.0), []

    def meet():
        try:
            join_group("gloo", HOST, 0, 2, 0, "b", 60.0, own)
        except RuntimeError as error:
            ends.append(error)

    thread = threading.Thread(target=meet)
    thread.start()
    time.sleep(0.2)
    store = None
    thread.join(20)
    assert len(ends) == 1


def test_a_process_can_exit_as_a_member_of_a_group():
    """The process is started, not forked, because its interpreter ends as that of a program."""
    code = """
    import sys, torch
    from mtrl.distributed.broadcast import broadcast, join_group, open_store
    store = open_store("127.0.0.1", 30)
    print(store.port, flush=True)
    group = join_group("gloo", "127.0.0.1", store.port, 2, 0, "weights", 30)
    broadcast(group, [torch.ones(3)], 30)
    try:
        broadcast(group, [torch.zeros(30_000_000)], 1)
    except RuntimeError:
        sys.exit(3)
    """
    with (
        process(code, start=subprocess.Popen) as child,
        process(MEMBER, child.stdout.readline().strip(), int(signal.SIGSTOP)),
    ):
        assert child.wait(60) == 3


def test_the_store_listens_only_at_its_own_address():
    store = open_store(HOST, 5.0)
    with open(f"/proc/{os.getpid()}/net/tcp") as table:
        rows = [line.split() for line in table][1:]
    listening = [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{store.port:04X}")]
    assert listening == [f"0100007F:{store.port:04X}"]


def test_other_backends_are_an_error():
    store = open_store(HOST, 5.0)
    with pytest.raises(ValueError, match="mpi"):
        join_group("mpi", HOST, store.port, 2, 0, "weights", 1.0)


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]))),
       st.integers(1, 100))  # fmt: skip
def test_buckets_hold_every_tensor_once_within_the_limit(sizes, limit):
    weights = [(str(i), torch.zeros(size, dtype=dtype)) for i, (size, dtype) in enumerate(sizes)]
    parts = list(buckets(weights, limit))
    assert sorted(name for part in parts for name, _ in part) == sorted(name for name, _ in weights)
    for part in parts:
        assert len({value.dtype for _, value in part}) == 1
        assert len(part) == 1 or sum(value.nbytes for _, value in part) <= limit
