"""`World`: joining of ranks, and exchange of values."""

import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from rank_groups import run_ranks_of

from mtrl.distributed import world as world_module
from mtrl.distributed.lifeline import is_of_network, shortened
from mtrl.distributed.world import World
from mtrl.errors import JobLost, UserError

TRAVEL = """
import threading
import torch, torch.distributed as dist
from mtrl.distributed.world import World

# The leader's time limit holds on every rank, or the barrier below would end the second one.
world = World.join(30.0 if __import__("os").environ["RANK"] == "0" else 29.0)
value = {"leader": torch.ones(2)}
got = world.broadcast(value if world.is_leader else "not looked at")
print(got, got is value)
print(world.scatter([("a", 1), ("b", 2)] if world.is_leader else None))
print(world.gather(f"of {world.rank}"))
own = threading.Lock() if world.is_leader else world.rank  # a lock cannot be sent
print(world.is_leader == (world.gather(own) == [own, 1]))

held = []
def beside():
    number = torch.tensor(world.rank + 10)
    dist.all_reduce(number, group=world.background_group)
    held.append(number.item())
thread = threading.Thread(target=beside)
if world.is_leader:
    thread.start()
number = torch.tensor(world.rank + 1)
dist.all_reduce(number)  # while only one rank is in the other group
if not world.is_leader:
    thread.start()
thread.join()
print(number.item(), held, world.size, world.local_rank, world.is_leader)
world.close()
print(dist.is_initialized(), [t.name for t in threading.enumerate()])
"""


@pytest.fixture(autouse=True)
def no_group():
    """Earlier tests of this worker may have sharded a model on one rank, which leaves a process group behind."""
    if dist.is_initialized():
        dist.destroy_process_group()


def launched(monkeypatch, rank, size, **more):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in (variables | more).items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, str(value))


def test_a_single_process_needs_no_process_groups():
    world, value = World(), object()
    assert (world.rank, world.size, world.local_rank, world.is_leader) == (0, 1, 0, True)
    assert world.broadcast(value) is value and world.scatter([value]) is value and world.gather(value) == [value]
    assert world.background_group is None and not dist.is_initialized()
    with world.reporting_errors(), pytest.raises(ZeroDivisionError):
        raise ZeroDivisionError
    world.close()


def test_without_torchrun_the_world_has_one_rank(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert World.join(1.0) == World() and not dist.is_initialized()


def test_values_are_broadcast_scattered_and_gathered(tmp_path):
    leader, follower = run_ranks_of(tmp_path, TRAVEL, 2)
    assert leader.out == [
        "{'leader': tensor([1., 1.])} True",
        "('a', 1)",
        "['of 0', 'of 1']",
        "True",
        "3 [21] 2 0 True",
        "False ['MainThread']",
    ]
    assert follower.out == [
        "{'leader': tensor([1., 1.])} False",
        "('b', 2)",
        "None",
        "True",
        "3 [21] 2 1 False",
        "False ['MainThread']",
    ]
    assert [(rank.status, rank.err) for rank in (leader, follower)] == [(0, [])] * 2


def test_a_launch_of_one_rank_has_a_group_and_no_lifeline(monkeypatch):
    launched(monkeypatch, 0, 1)
    world = World.join(5.0)
    try:
        assert dist.get_world_size() == 1
        assert world.broadcast(3) == 3 and world.gather(4) == [4] and world.background_group is None
    finally:
        world.close()
    assert not dist.is_initialized()


@pytest.mark.parametrize("rank", [0, 1])
def test_missing_ranks_end_the_others(monkeypatch, rank):
    launched(monkeypatch, rank, 2)
    with pytest.raises(JobLost) as caught:
        World.join(1.0)
    assert str(caught.value).startswith(f"rank {rank} of 2: the other ranks did not join within 1 s (")
    assert "); if nothing started them, unset RANK and WORLD_SIZE; " in str(caught.value)
    assert not dist.is_initialized()


def test_a_port_in_use_is_an_error(monkeypatch):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        launched(monkeypatch, 0, 2, MASTER_PORT=port)
        with pytest.raises(UserError, match=f"MASTER_PORT={port} is in use .* --standalone"):
            World.join(5.0)
    assert not dist.is_initialized()


def test_an_interrupted_join_leaves_no_group(monkeypatch):
    """Ctrl-C or the loss of a rank can interrupt the creation of groups. gloo may abort a process that exits with a
    group."""

    def connect(*_):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        raise KeyboardInterrupt

    monkeypatch.setattr(world_module, "connect_ranks", connect)
    launched(monkeypatch, 0, 2)
    with pytest.raises(KeyboardInterrupt):
        World.join(5.0)
    assert not dist.is_initialized()


UNREAD = """
import sys, threading, time
from mtrl.distributed.ending import end_process
from mtrl.errors import JobLost
sys.stderr.close()
threading.Thread(target=end_process, args=[JobLost(1, 2, "why")]).start()
time.sleep(60)  # as in a collective
"""


def test_a_closed_stderr_does_not_prevent_the_exit():
    assert subprocess.run([sys.executable, "-c", UNREAD], timeout=90).returncode == 1


def test_an_incomplete_launch_environment_is_an_error(monkeypatch):
    launched(monkeypatch, 0, 2, MASTER_ADDR=None)
    with pytest.raises(UserError, match="RANK=0 and WORLD_SIZE=2, but not both of .*; start them with torchrun, or"):
        World.join(1.0)
    launched(monkeypatch, 0, 2, MASTER_PORT="http")
    with pytest.raises(UserError, match="the environment has MASTER_PORT=http, which is not a whole number"):
        World.join(1.0)
    launched(monkeypatch, "first", 2)
    with pytest.raises(UserError, match="the environment has RANK=first, which is not a whole number"):
        World.join(1.0)


def test_more_ranks_than_gpus_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    launched(monkeypatch, 2, 4)
    with pytest.raises(UserError, match="started rank 2 on a machine with 2 GPUs; lower --nproc-per-node to that"):
        World.join(1.0)


def test_every_rank_selects_its_gpu(monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(world_module, "connect_ranks", lambda backend, *_: taken.append(backend))
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # set by the user, so it must not change
    launched(monkeypatch, 1, 2)
    assert World.join(1.0) == World(1, 2, 1) and taken == [1, "cpu:gloo,cuda:nccl"]
    assert world_module.os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"


def test_lost_connections_are_distinguished_from_other_errors():
    closed = RuntimeError(
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:29. "
        "This is typically caused by a remote worker crashing.\nMore"
    )
    assert is_of_network(closed) and shortened(closed) == "Connection closed by peer [127.0.0.1]:29"
    assert is_of_network(dist.DistBackendError("NCCL error")) and is_of_network(dist.DistNetworkError("x"))
    assert not is_of_network(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_of_network(ConnectionResetError("Connection reset by peer"))  # an error of a user's endpoint
    assert shortened(ValueError("")) == "ValueError"
