"""The token that every request to a server must carry, as a string that keeps it out of logs."""

from __future__ import annotations

TOKEN = "MTRL_SERVER_TOKEN"
"""Name of the environment variable that holds the token."""


class Secret(str):
    """A string whose `repr` is three stars, because SGLang logs all its settings, including API keys."""

    def __repr__(self) -> str:
        return "'***'"
