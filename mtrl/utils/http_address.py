"""Addresses of HTTP servers that a user writes into a configuration."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit


def http_address(url: str) -> SplitResult | None:
    """Return the parts of an address `http(s)://HOST[:PORT][/PATH]`; None if `url` is none, for example because it has
    no host or no valid port."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an open bracket, or a port that is no number below 65536
        return None
    return parts if is_address else None
