"""Authentication: finds the one trajectory that a request's token, path and headers name."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mtrl.gateway.exchange import RequestError

if TYPE_CHECKING:
    from mtrl.gateway.session import Session

MAX_NAME_LENGTH = 200
NOT_FOUND = "trajectory_not_found"
TOKEN_PREFIX = "sk-mtrl-"
MAX_FINISHED = 10_000
"""Maximum number of finished trajectories whose tokens are stored. A request with such a token gets the error that the
trajectory is over, not that it is unknown."""
SECONDS_OF_BURST = 2.0
"""Length of a burst in seconds: a trajectory may send the requests of this many seconds at once. The rate limit keeps a
program that sends requests in a loop from slowing others down."""


def new_token() -> str:
    """Return a new token of 192 random bits. Its prefix lets a person recognise it in a log."""
    return f"{TOKEN_PREFIX}{secrets.token_urlsafe(24)}"


@dataclass(frozen=True)
class Credentials:
    """The credentials and names that a request carries."""

    bearer: str | None = None
    """Token from the `Authorization: Bearer` header, or from `X-Api-Key`, which Anthropic's clients send."""
    segment: str | None = None
    """Segment of the path `/trajectories/{segment}/…`: a token, which is sufficient by itself, or a name."""
    names: tuple[str, ...] = ()
    """Tokens or names from the headers, and from the body of a report. Agents of the managed service send an AWS key as
    their bearer token, and some know only the id of their trajectory."""

    @property
    def named(self) -> tuple[str, ...]:
        """All tokens and names outside the bearer token; they must agree on one trajectory."""
        return self.names if self.segment is None else (self.segment, *self.names)


class RateLimitedSession:
    """A session with a limit on the rate of its requests (a token bucket)."""

    def __init__(self, session: Session):
        self.session = session
        self._rate = session.limits.max_requests_per_second
        self._capacity = max(1.0, self._rate * SECONDS_OF_BURST)
        self._available, self._updated = self._capacity, time.monotonic()

    def consume(self) -> None:
        """Count one request against the limit.

        Raises:
            RequestError: 429, the limit is reached.
        """
        now = time.monotonic()
        self._available, self._updated = min(self._capacity, self._available + self._rate * (now - self._updated)), now
        if self._available < 1:
            message = f"this trajectory sends more than {self._rate:g} requests per second (max_requests_per_second)"
            raise RequestError(429, message, "rate_limit")
        self._available -= 1


@dataclass
class SessionRegistry:
    """The open sessions of a gateway. Tokens are looked up by their digests, so that timing reveals nothing of them."""

    admin_key: str | None = None
    """Key of the administrator. A request with it may name any trajectory."""
    open_session: Callable[[str], Session] | None = None
    """Function that opens the session of a new name for the admin."""
    used: set[str] = field(default_factory=set)
    """Names that cannot be used again. Where the admin names trajectories, every finished one is added."""

    def __post_init__(self) -> None:
        self._by_token: dict[bytes, RateLimitedSession] = {}
        self._by_name: dict[str, RateLimitedSession] = {}
        self._finished: OrderedDict[bytes, str] = OrderedDict()

    def __iter__(self) -> Iterator[Session]:
        return iter([entry.session for entry in self._by_token.values()])

    def __contains__(self, name: str) -> bool:
        """Whether a trajectory of this name is open, or was used before."""
        return name in self._by_name or name in self.used

    def add(self, session: Session) -> None:
        """Register an open session.

        Raises:
            ValueError: an open session has the same name; the engine would mix the two.
        """
        if session.name in self._by_name:
            raise ValueError(f"there is an open trajectory {session.name} already")
        self._by_token[_digest(session.token)] = self._by_name[session.name] = RateLimitedSession(session)

    def remove(self, session: Session) -> None:
        """Unregister a session, and store its token as that of a finished trajectory."""
        digest = _digest(session.token)
        if self._by_token.pop(digest, None) is None:
            return
        del self._by_name[session.name]
        self._finished[digest] = session.name
        if self.open_session is not None:
            self.used.add(session.name)
        while len(self._finished) > MAX_FINISHED:
            self._finished.popitem(last=False)

    def is_admin(self, credentials: Credentials) -> bool:
        if self.admin_key is None or credentials.bearer is None:
            return False
        return hmac.compare_digest(_digest(credentials.bearer), _digest(self.admin_key))

    def find(self, credentials: Credentials) -> Session:
        """Return the session of a request, and count the request against its limit.

        Raises:
            RequestError: 400 the admin's request names no trajectory; 401 no known token; 403 the request names two
                trajectories; 404 the path or the admin names an unknown trajectory; 410 the trajectory is over; 429
                too many requests.
        """
        entry = self._find_entry(credentials)
        session = entry.session
        if any(name not in (session.name, session.token) for name in credentials.named):
            raise RequestError(403, "this request names two trajectories", "trajectory_mismatch")
        entry.consume()
        return session

    def find_or_open(self, credentials: Credentials) -> Session:
        """Like `find`, but opens a trajectory that the admin names for the first time."""
        if self.open_session is not None and self.is_admin(credentials) and credentials.named:
            name = credentials.named[0]
            if name not in self and self._entry_of_token(name) is None:
                self.open_session(check_name(name))
        return self.find(credentials)

    def _find_entry(self, credentials: Credentials) -> RateLimitedSession:
        if self.is_admin(credentials):
            return self._entry_for_admin(credentials)
        # An unknown bearer token may be a key of another service; the token in the URL or the id is then sufficient.
        for token in (credentials.bearer, *credentials.named):
            if token is not None and (entry := self._entry_of_token(token)) is not None:
                return entry
        raise self._unknown_client(credentials)

    def _entry_of_token(self, token: str) -> RateLimitedSession | None:
        """Return the open session of a token; None if the token is unknown.

        Raises:
            RequestError: 410, the trajectory is over.
        """
        digest = _digest(token)
        if digest in self._finished:
            raise trajectory_over(self._finished[digest])
        return self._by_token.get(digest)

    def _entry_for_admin(self, credentials: Credentials) -> RateLimitedSession:
        """Return the session that the admin names by its token or its name."""
        if not credentials.named:
            raise RequestError(400, "name a trajectory, by /trajectories/NAME/v1 or X-Mtrl-Trajectory-Id")
        name = credentials.named[0]
        entry = self._entry_of_token(name) or self._by_name.get(name)
        if entry is None:
            raise trajectory_over(name) if name in self else RequestError(404, "there is no such trajectory", NOT_FOUND)
        return entry

    def _unknown_client(self, credentials: Credentials) -> RequestError:
        # The answer depends on the form of the segment alone, so that a client without a key learns no names.
        if credentials.segment is not None and credentials.segment.startswith(TOKEN_PREFIX):
            return RequestError(404, "no trajectory has this URL", NOT_FOUND)
        if credentials.bearer is None:
            return RequestError(401, "the request has no API key; send that of the trajectory", "invalid_api_key")
        return RequestError(401, "the API key belongs to no trajectory", "invalid_api_key")


def check_name(name: object) -> str:
    """Return a name that a client chose, if it is valid for a trajectory.

    Raises:
        RequestError: 400, the name is not valid.
    """
    if isinstance(name, str) and 0 < len(name) <= MAX_NAME_LENGTH and name.isprintable() and "#" not in name:
        return name
    what = f"the id of a trajectory is a text of at most {MAX_NAME_LENGTH} printable characters without #"
    raise RequestError(400, what, param="id")


def trajectory_over(name: str) -> RequestError:
    """Return the error for a finished trajectory. The managed service's SDK recognises its text and stops reporting."""
    return RequestError(410, f"trajectory {name} is not in valid status: it is over", "trajectory_over")


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()
