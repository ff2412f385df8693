"""Who can reach an SGLang server: the token that every request must carry, and the loopback address at which the ranks
meet. This module runs inside the engine's environment: torch and the standard library only."""

from __future__ import annotations

import socket
from importlib import import_module
from typing import Any

from mtrl.utils.serving import is_loopback

TOKEN = "MTRL_SERVER_TOKEN"
"""Name of the environment variable that holds the token."""


class Secret(str):
    """A string whose `repr` is three stars, because SGLang logs all its settings, including API keys."""

    def __repr__(self) -> str:
        return "'***'"


def meet_on_loopback() -> None:
    """Patch torch so that a store that `tcp://` or `env://` opens at a loopback host listens at that address alone.

    Torch's own store listens at every address of the machine, whatever its host, and needs no password; the rendezvous
    has no option to change that. Stores at other hosts are not changed, because ranks of other machines must reach
    them. If torch opens stores in another way, nothing is changed.
    """
    rendezvous = import_module("torch.distributed.rendezvous")  # as attribute of the package it is a function

    make_store = getattr(rendezvous, "TCPStore", None)
    if make_store is None:
        return

    def make_local_store(**options: Any) -> Any:
        host, port = str(options.get("host_name", "")), int(options.get("port", 0))
        if not (options.get("is_master") and is_loopback(host)):
            return make_store(**options)
        try:
            listener = socket.create_server((host, port), family=_family(host))
        except OSError:  # torch's own store is shared and listens already, or torch raises the right error
            return make_store(**options)
        port = listener.getsockname()[1]
        return make_store(**{**options, "port": port, "master_listen_fd": listener.detach()})  # the store owns it now

    rendezvous.TCPStore = make_local_store  # type: ignore[attr-defined]


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
