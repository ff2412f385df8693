"""The weights that were sent last, and the servers that keep them, to which changes of these weights can be sent."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from mtrl.engines.server.server_api import ServerApi
from mtrl.engines.server.sync import Weights


class SentWeights:
    """References to the tensors, and no copies: they must not change after they were sent. `ServerGroup` stores the
    same tensors for servers that are restarted."""

    def __init__(self) -> None:
        self._weights: Weights | None = None
        self._servers: list[ServerApi] = []
        """Servers that keep `_weights`."""

    def base(self, servers: Sequence[ServerApi]) -> Weights | None:
        """Return the weights that all these servers keep; None: there are none."""
        return self._weights if all(server in self._servers for server in servers) else None

    def forget(self, servers: Collection[ServerApi]) -> None:
        """Note that these servers may keep other weights from now on."""
        self._servers = [server for server in self._servers if server not in servers]
        if not self._servers:
            self._weights = None

    def record(self, servers: Collection[ServerApi], tensors: Mapping[str, Tensor], version: int) -> None:
        """Note that these servers keep these weights now."""
        known = self._weights
        if known is None or known.tensors is not tensors or known.version != version:
            self._weights, self._servers = Weights(tensors, version), []
        self._servers += servers
        if not self._servers:
            self._weights = None
