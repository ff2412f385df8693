"""SGLang's ranks meet where only this machine can reach them. Runs inside the engine's environment: torch and the
standard library only."""

from __future__ import annotations

import socket
from importlib import import_module
from typing import Any

from mtrl.distributed.broadcast import is_loopback


def meet_on_loopback() -> None:
    """From now on a store that torch's `tcp://` and `env://` open at a loopback host listens at that address alone.

    Torch's own listens at every address of the machine whatever host it was given, asks nobody for a password, and its
    rendezvous has no option for it. Other hosts stay as they are: ranks of other machines have to get there. So does
    everything where torch has another way to open a store.
    """
    rendezvous = import_module("torch.distributed.rendezvous")  # the package has a function of this name

    make_store = getattr(rendezvous, "TCPStore", None)
    if make_store is None:
        return

    def make_local_store(**options: Any) -> Any:
        host, port = str(options.get("host_name", "")), int(options.get("port", 0))
        if not (options.get("is_master") and is_loopback(host)):
            return make_store(**options)
        try:
            listener = socket.create_server((host, port), family=_family(host))
        except OSError:  # torch's own store has it already, and is shared; or torch says what is wrong
            return make_store(**options)
        port = listener.getsockname()[1]
        return make_store(**{**options, "port": port, "master_listen_fd": listener.detach()})  # which owns it now

    rendezvous.TCPStore = make_local_store  # type: ignore[attr-defined]


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
