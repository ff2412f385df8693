"""The token that every request to a server has to show, and how it stays out of logs."""

from __future__ import annotations

TOKEN = "MTRL_SERVER_TOKEN"
"""Environment variable that holds it."""


class Secret(str):
    """SGLang logs all its settings, its keys with them: `repr` of this one is three stars."""

    def __repr__(self) -> str:
        return "'***'"
