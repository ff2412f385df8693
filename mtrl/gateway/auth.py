"""Who a request is: the one trajectory that its token, its path and its headers name."""

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
"""So many trajectories that are over are told from ones that never were."""
SECONDS_OF_BURST = 2.0
"""What a trajectory may ask in so many seconds it may ask at once. A program that asks in a loop harms no other."""


def new_token() -> str:
    """192 random bits. The beginning is there for whoever finds it in a log."""
    return f"{TOKEN_BEGINS}{secrets.token_urlsafe(24)}"


@dataclass(frozen=True)
class Credentials:
    """What a request says of itself."""

    bearer: str | None = None
    """Of `Authorization: Bearer`."""
    segment: str | None = None
    """Of the path `/trajectories/{segment}/…`: a token, which alone is enough, or a name."""
    names: tuple[str, ...] = ()
    """Of the headers, and in a report of the body: tokens or names as well. Agents of the managed service show a key of
    AWS, and some know the id of their trajectory alone."""

    @property
    def named(self) -> tuple[str, ...]:
        """What should all be one trajectory."""
        return self.names if self.segment is None else (self.segment, *self.names)


class Seat:
    """A session and how many requests it may make now."""

    def __init__(self, session: Session):
        self.session = session
        self._rate = session.limits.max_requests_per_second
        self._most = max(1.0, self._rate * SECONDS_OF_BURST)
        self._left, self._since = self._most, time.monotonic()

    def take(self) -> None:
        """
        Raises:
            RequestError: 429.
        """
        now = time.monotonic()
        self._left, self._since = min(self._most, self._left + self._rate * (now - self._since)), now
        if self._left < 1:
            message = f"this trajectory asks more than {self._rate:g} times a second (max_requests_per_second)"
            raise RequestError(429, message, "rate_limit")
        self._left -= 1


@dataclass
class Register:
    """The open sessions of a gateway. Tokens are looked up by their digests, so that time tells nothing of them."""

    admin_key: str | None = None
    """Who shows it may name any trajectory."""
    admit: Callable[[str], Session] | None = None
    """Makes the session of a new name, for the admin."""
    used: set[str] = field(default_factory=set)
    """Names that were given before and are given no more; where the admin names trajectories, each that is over."""

    def __post_init__(self) -> None:
        self._by_token: dict[bytes, Seat] = {}
        self._by_name: dict[str, Seat] = {}
        self._over: OrderedDict[bytes, str] = OrderedDict()

    def __iter__(self) -> Iterator[Session]:
        return iter([seat.session for seat in self._by_token.values()])

    def __contains__(self, name: str) -> bool:
        """Whether there is such a trajectory, or was."""
        return name in self._by_name or name in self.used

    def add(self, session: Session) -> None:
        """
        Raises:
            ValueError: its name is taken; the engine would mix the two.
        """
        if session.name in self._by_name:
            raise ValueError(f"there is an open trajectory {session.name} already")
        self._by_token[_digest(session.token)] = self._by_name[session.name] = Seat(session)

    def remove(self, session: Session) -> None:
        """From now on its token is that of a trajectory that is over."""
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
        """
        Raises:
            RequestError: 401 without a token that is known, 403 where two trajectories are named, 404 where the path
                names none, 410 if it is over, 429 if it asks too often.
        """
        seat = self._seat(credentials)
        session = seat.session
        if any(name not in (session.name, session.token) for name in credentials.named):
            raise RequestError(403, "this request names two trajectories", "trajectory_mismatch")
        seat.take()
        return session

    def find_or_admit(self, credentials: Credentials) -> Session:
        """As `find`, but a trajectory that the admin names first is made."""
        if self.admit is not None and self.is_admin(credentials) and credentials.named:
            name = credentials.named[0]
            if name not in self and self._of_token(name) is None:
                self.admit(check_name(name))
        return self.find(credentials)

    def _seat(self, credentials: Credentials) -> Seat:
        if self.is_admin(credentials):
            return self._named(credentials)
        # A bearer that is not known is a key of another service: the URL or the id is enough.
        for token in (credentials.bearer, *credentials.named):
            if token is not None and (seat := self._of_token(token)) is not None:
                return seat
        raise self._stranger(credentials)

    def _of_token(self, token: str) -> Seat | None:
        """
        Raises:
            RequestError: 410, it is over.
        """
        digest = _digest(token)
        if digest in self._over:
            raise over(self._over[digest])
        return self._by_token.get(digest)

    def _named(self, credentials: Credentials) -> Seat:
        """What the admin names."""
        if not credentials.named:
            raise RequestError(400, "name a trajectory, by /trajectories/NAME/v1 or X-Mtrl-Trajectory-Id")
        name = credentials.named[0]
        seat = self._of_token(name) or self._by_name.get(name)
        if seat is None:
            raise over(name) if name in self else RequestError(404, "there is no such trajectory", NOT_FOUND)
        return seat

    def _stranger(self, credentials: Credentials) -> RequestError:
        # By its form alone, so that nobody without a key learns which names there are.
        if credentials.segment is not None and credentials.segment.startswith(TOKEN_BEGINS):
            return RequestError(404, "there is no trajectory of this URL", NOT_FOUND)
        if credentials.bearer is None:
            return RequestError(401, "there is no API key; show that of the trajectory", "invalid_api_key")
        return RequestError(401, "the API key is of no trajectory", "invalid_api_key")


def check_name(name: object) -> str:
    """A name that somebody else thought of, if a trajectory can have it.

    Raises:
        RequestError: 400.
    """
    if isinstance(name, str) and 0 < len(name) <= LONGEST_NAME and name.isprintable() and "#" not in name:
        return name
    what = f"the id of a trajectory is a text of at most {LONGEST_NAME} printable characters without #"
    raise RequestError(400, what, param="id")


def over(name: str) -> RequestError:
    """The managed service's words, by which its SDK knows that there is nothing more to report."""
    return RequestError(410, f"trajectory {name} is not in valid status: it is over", "trajectory_over")


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()
