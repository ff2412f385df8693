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

from mtrl.gateway.errors import RequestError

if TYPE_CHECKING:
    from mtrl.gateway.session import Session

LONGEST_NAME = 200
NOT_FOUND = "trajectory_not_found"
TOKEN_BEGINS = "sk-mtrl-"
REMEMBERED = 10_000
"""Number of finished trajectories that the gateway remembers, so that it can tell a finished trajectory from an unknown
one."""
SECONDS_OF_BURST = 2.0
"""Length of a burst in seconds: a trajectory may send the requests of this many seconds at once. The rate limit keeps a
program that sends requests in a loop from slowing others down."""


def new_token() -> str:
    """Return a new token of 192 random bits. Its prefix lets a person recognise it in a log."""
    return f"{TOKEN_BEGINS}{secrets.token_urlsafe(24)}"


@dataclass(frozen=True)
class Credentials:
    """The credentials and names that a request carries."""

    bearer: str | None = None
    """Token from the `Authorization: Bearer` header."""
    segment: str | None = None
    """Segment of the path `/trajectories/{segment}/…`: a token, which is sufficient by itself, or a name."""
    names: tuple[str, ...] = ()
    """Tokens or names from the headers, and from the body of a report. Agents of the managed service send an AWS key as
    their bearer token, and some know only the id of their trajectory."""

    @property
    def named(self) -> tuple[str, ...]:
        """All tokens and names outside the bearer token; they must agree on one trajectory."""
        return self.names if self.segment is None else (self.segment, *self.names)


class Seat:
    """A session and its request budget, a token bucket."""

    def __init__(self, session: Session):
        self.session = session
        self._rate = session.limits.max_requests_per_second
        self._most = max(1.0, self._rate * SECONDS_OF_BURST)
        self._left, self._since = self._most, time.monotonic()

    def take(self) -> None:
        """Use up one request of the budget.

        Raises:
            RequestError: 429, the budget is empty.
        """
        now = time.monotonic()
        self._left, self._since = min(self._most, self._left + self._rate * (now - self._since)), now
        if self._left < 1:
            message = f"this trajectory asks more than {self._rate:g} times a second (max_requests_per_second)"
            raise RequestError(429, message, "rate_limit")
        self._left -= 1


@dataclass
class Register:
    """The open sessions of a gateway. Tokens are looked up by their digests, so that timing reveals nothing of them."""

    admin_key: str | None = None
    """Key of the administrator. A request with it may name any trajectory."""
    admit: Callable[[str], Session] | None = None
    """Function that opens the session of a new name for the admin."""
    used: set[str] = field(default_factory=set)
    """Names that cannot be used again. Where the admin names trajectories, every finished one is added."""

    def __post_init__(self) -> None:
        self._by_token: dict[bytes, Seat] = {}
        self._by_name: dict[str, Seat] = {}
        self._over: OrderedDict[bytes, str] = OrderedDict()

    def __iter__(self) -> Iterator[Session]:
        return iter([seat.session for seat in self._by_token.values()])

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
        self._by_token[_digest(session.token)] = self._by_name[session.name] = Seat(session)

    def remove(self, session: Session) -> None:
        """Unregister a session, and remember its token as that of a finished trajectory."""
        digest = _digest(session.token)
        if self._by_token.pop(digest, None) is None:
            return
        del self._by_name[session.name]
        self._over[digest] = session.name
        if self.admit is not None:
            self.used.add(session.name)
        while len(self._over) > REMEMBERED:
            self._over.popitem(last=False)

    def is_admin(self, credentials: Credentials) -> bool:
        if self.admin_key is None or credentials.bearer is None:
            return False
        return hmac.compare_digest(_digest(credentials.bearer), _digest(self.admin_key))

    def find(self, credentials: Credentials) -> Session:
        """Return the session of a request, and use up one request of its budget.

        Raises:
            RequestError: 400 the admin's request names no trajectory; 401 no known token; 403 the request names two
                trajectories; 404 the path or the admin names an unknown trajectory; 410 the trajectory is over; 429
                too many requests.
        """
        seat = self._seat(credentials)
        session = seat.session
        if any(name not in (session.name, session.token) for name in credentials.named):
            raise RequestError(403, "this request names two trajectories", "trajectory_mismatch")
        seat.take()
        return session

    def find_or_admit(self, credentials: Credentials) -> Session:
        """Like `find`, but opens a trajectory that the admin names for the first time."""
        if self.admit is not None and self.is_admin(credentials) and credentials.named:
            name = credentials.named[0]
            if name not in self and self._of_token(name) is None:
                self.admit(check_name(name))
        return self.find(credentials)

    def _seat(self, credentials: Credentials) -> Seat:
        if self.is_admin(credentials):
            return self._named(credentials)
        # An unknown bearer token may be a key of another service; the token in the URL or the id is then sufficient.
        for token in (credentials.bearer, *credentials.named):
            if token is not None and (seat := self._of_token(token)) is not None:
                return seat
        raise self._stranger(credentials)

    def _of_token(self, token: str) -> Seat | None:
        """Return the open session of a token; None if the token is unknown.

        Raises:
            RequestError: 410, the trajectory is over.
        """
        digest = _digest(token)
        if digest in self._over:
            raise over(self._over[digest])
        return self._by_token.get(digest)

    def _named(self, credentials: Credentials) -> Seat:
        """Return the session that the admin names by its token or its name."""
        if not credentials.named:
            raise RequestError(400, "name a trajectory, by /trajectories/NAME/v1 or X-Mtrl-Trajectory-Id")
        name = credentials.named[0]
        seat = self._of_token(name) or self._by_name.get(name)
        if seat is None:
            raise over(name) if name in self else RequestError(404, "there is no such trajectory", NOT_FOUND)
        return seat

    def _stranger(self, credentials: Credentials) -> RequestError:
        # The answer depends on the form of the segment alone, so that a client without a key learns no names.
        if credentials.segment is not None and credentials.segment.startswith(TOKEN_BEGINS):
            return RequestError(404, "there is no trajectory of this URL", NOT_FOUND)
        if credentials.bearer is None:
            return RequestError(401, "there is no API key; show that of the trajectory", "invalid_api_key")
        return RequestError(401, "the API key is of no trajectory", "invalid_api_key")


def check_name(name: object) -> str:
    """Return a name that a client chose, if it is valid for a trajectory.

    Raises:
        RequestError: 400, the name is not valid.
    """
    if isinstance(name, str) and 0 < len(name) <= LONGEST_NAME and name.isprintable() and "#" not in name:
        return name
    what = f"the id of a trajectory is a text of at most {LONGEST_NAME} printable characters without #"
    raise RequestError(400, what, param="id")


def over(name: str) -> RequestError:
    """Return the error for a finished trajectory. The managed service's SDK recognises its text and stops reporting."""
    return RequestError(410, f"trajectory {name} is not in valid status: it is over", "trajectory_over")


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()
