"""Rules that all HTTP clients of mtrl share: which responses are retried, the pauses between attempts, the size limit
of a response, and the error message in its body."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import AsyncIterable
from email.utils import parsedate_to_datetime

from mtrl.utils.text import one_line, redacted

TEMPORARY = frozenset({408, 409, 425, 429})
"""HTTP statuses below 500 that ask the client to try again."""
BUSY = frozenset({429, 503})
"""HTTP statuses of an overloaded server."""
NO_CREDIT = ("insufficient_quota", "billing")
"""Words in the body of a 429 whose account has no credit left."""
MAX_DOUBLINGS = 64
"""Number of retries after which a pause is no longer doubled, since a float cannot hold 2^1024."""
MAX_MESSAGE_CHARACTERS = 300
"""Maximum number of characters of a server's message in an error of mtrl."""
MESSAGE_KEYS = ("error", "message", "detail", "error_message", "msg")
"""Keys under which servers put the text of an error in a JSON object; the first with a value is used."""


class ResponseTooLargeError(ValueError):
    """The body of a response exceeds the size limit of its client."""


# -- retries ----------------------------------------------------------------------------------------------------------


def is_server_error(status: int) -> bool:
    """Whether the server failed (status 500 or above), and not the request."""
    return status >= 500


def is_temporary(status: int, body: str = "") -> bool:
    """Whether a retry of the same request can succeed. After a 429 it cannot if `body` reports that the account has no
    credit left."""
    return is_server_error(status) or (status in TEMPORARY and not has_no_credit(body))


def has_no_credit(body: str) -> bool:
    """Whether the body of a 429 reports that the account has no credit left."""
    return any(word in body.casefold() for word in NO_CREDIT)


def exponential_pause(retry: int, first: float, longest: float) -> float:
    """Return the pause before a retry in seconds: `first` * 2^retry, times a random factor from 0.5 to 1.5, at most
    `longest`. The factor spreads the retries of clients that failed at the same moment.

    Args:
        retry: number of retries before this one; 0 for the first.
    """
    doubled = 2.0 ** min(retry, MAX_DOUBLINGS)
    return min(first * doubled * random.uniform(0.5, 1.5), longest)


def linear_pause(retry: int, first: float) -> float:
    """Return the pause before a retry in seconds: `first` * (retry + 1), so that the sum of all pauses is known.

    Args:
        retry: number of retries before this one; 0 for the first.
    """
    return first * (retry + 1)


def retry_after(header: str) -> float:
    """Return the seconds for which a `Retry-After` header asks the client to wait; 0 where it holds neither a number of
    seconds nor a date."""
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header).timestamp() - time.time()
        except (ValueError, TypeError):
            return 0.0
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0


# -- bodies and messages ----------------------------------------------------------------------------------------------


async def read_body(parts: AsyncIterable[bytes], max_bytes: int) -> bytes:
    """Read the body of a response.

    Raises:
        ResponseTooLargeError: the body has more than `max_bytes` bytes; the rest is not read.
    """
    content = bytearray()
    async for part in parts:
        content += part
        if len(content) > max_bytes:
            raise ResponseTooLargeError(f"the answer is larger than {max_bytes:,} bytes")
    return bytes(content)


def error_message(body: bytes) -> str:
    """Return the error message in the body of a response: the value under the first key of `MESSAGE_KEYS`, in nested
    objects too, or else the whole body."""
    text = body.decode("utf-8", "replace")
    try:
        message = json.loads(text)
        while isinstance(message, dict) and (key := next((key for key in MESSAGE_KEYS if message.get(key)), None)):
            message = message[key]
        return message if isinstance(message, str) else json.dumps(message)
    except (ValueError, RecursionError):
        return text


def exception_message(error: Exception) -> str:
    """Return the type and the text of an exception of an HTTP library; some have no text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def printable(text: str, secret: str | None = None) -> str:
    """Return text from a server as one printable line of at most `MAX_MESSAGE_CHARACTERS` characters, in which stars
    replace our `secret`."""
    return one_line(" ".join(redacted(text, [secret or ""]).split()), MAX_MESSAGE_CHARACTERS)
