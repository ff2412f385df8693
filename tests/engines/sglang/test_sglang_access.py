"""The addresses at which the stores of torch's rendezvous listen."""

import socket
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from mtrl.engines.server.process import free_port
from mtrl.engines.sglang.access import meet_on_loopback

rendezvous = import_module("torch.distributed.rendezvous")  # the package has a function of this name


@pytest.fixture
def made(monkeypatch):
    """The options of all stores that torch's own code makes. Its class is restored afterwards."""
    options = []

    def make_store(**given):
        options.append(given)
        return SimpleNamespace() if given["host_name"] == "elsewhere" else dist.TCPStore(**given)

    monkeypatch.setattr(rendezvous, "TCPStore", make_store)
    meet_on_loopback()
    return options


def meet(host, port, rank=0):
    return next(dist.rendezvous(f"tcp://{host}:{port}?rank={rank}&world_size=1"))[0]


def is_free(address, port):
    """Whether no process listens at this address; a listener at all addresses would conflict."""
    try:
        socket.create_server((address, port)).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_store_at_a_loopback_host_listens_only_there(made, host):
    port = free_port()
    store = meet(host, port)
    assert not is_free("127.0.0.1", port) and is_free("127.0.0.2", port)
    store.set("key", "value")
    assert meet(host, port, rank=1).get("key") == b"value"
    assert ["master_listen_fd" in options for options in made] == [True, False]


def test_a_store_may_be_opened_twice(made):
    port = free_port()
    first = meet("127.0.0.1", port)
    second = meet("127.0.0.1", port)
    first.set("default_pg/key", "value")
    assert second.get("default_pg/key") == b"value"
    assert is_free("127.0.0.2", port)


def test_a_taken_port_is_an_error(made):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(dist.DistNetworkError, match="EADDRINUSE"):
        meet("127.0.0.1", taken.getsockname()[1])


def test_a_store_for_other_machines_is_unchanged(made):
    meet("elsewhere", 1234)
    assert made[0]["is_master"] and "master_listen_fd" not in made[0]


def test_a_torch_without_the_store_is_unchanged(monkeypatch):
    monkeypatch.delattr(rendezvous, "TCPStore")
    meet_on_loopback()
    assert not hasattr(rendezvous, "TCPStore")
