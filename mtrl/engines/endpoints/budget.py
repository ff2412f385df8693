"""Costs of requests to endpoints: token counts, an enforced budget, and a file that stores the spending.

A budget reserves the maximum cost of a request before the request is sent, and records the cost that the answer reports
afterwards. A request that was in flight when its process was killed therefore counts as spent, and a budget holds over
any number of processes that run one after another.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrl.config.endpoint_schema import BudgetConfig, PriceConfig
from mtrl.errors import RunEndedError, UserError
from mtrl.utils.files import replace_file

if TYPE_CHECKING:
    import asyncio

log = logging.getLogger(__name__)

MILLION = 1_000_000
UNITS = {"usd": "USD", "requests": "requests", "tokens": "tokens"}
FRAME, PER_MESSAGE = 256, 16
"""Maximum number of tokens that a chat template adds: around the whole prompt, and per message."""


class BudgetSpentError(RunEndedError):
    """The budget is spent, so that no more requests are sent; answers received so far remain usable."""


@dataclass(frozen=True)
class TokenUsage:
    """Token counts of one request, as the provider reports them. Cached tokens are part of the prompt tokens."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def cost(self, price: PriceConfig) -> float | None:
        """Return the cost in USD; None where the price is not known."""
        if price.input is None or price.output is None:
            return None
        cached = min(self.cached_tokens, self.prompt_tokens)
        cached_price = price.input if price.cached is None else price.cached
        prompt = (self.prompt_tokens - cached) * price.input + cached * cached_price
        return (prompt + self.completion_tokens * price.output) / MILLION

    def __add__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.completion_tokens + other.completion_tokens,
        )


@dataclass(frozen=True)
class Spending:
    """Requests that were sent, and the tokens that they used."""

    requests: int = 0
    """Number of attempts, failed ones included."""
    retries: int = 0
    """Number of attempts that were retries."""
    counted: TokenUsage = TokenUsage()
    """Tokens that the provider reported."""
    unconfirmed_requests: int = 0
    """Number of requests without a complete answer or without a token count; the provider may have charged for them."""
    unconfirmed: TokenUsage = TokenUsage()
    """Upper bound of the tokens of the unconfirmed requests."""

    @property
    def tokens(self) -> int:
        """Upper bound of the prompt and completion tokens of all requests."""
        usages = (self.counted, self.unconfirmed)
        return sum(usage.prompt_tokens + usage.completion_tokens for usage in usages)

    def __add__(self, other: Spending) -> Spending:
        return Spending(
            self.requests + other.requests,
            self.retries + other.retries,
            self.counted + other.counted,
            self.unconfirmed_requests + other.unconfirmed_requests,
            self.unconfirmed + other.unconfirmed,
        )

    def metrics(self, price: PriceConfig) -> dict[str, float]:
        """Return counts and costs by name. Where the price is known they include `cost` (USD) and `cost_unconfirmed`
        (USD, upper bound of the additional cost of unconfirmed requests)."""
        values = {
            "prompt_tokens": self.counted.prompt_tokens,
            "completion_tokens": self.counted.completion_tokens,
            "cached_tokens": self.counted.cached_tokens,
            "requests": self.requests,
            "retries": self.retries,
            "unconfirmed_requests": self.unconfirmed_requests,
            "cost": self.counted.cost(price),
            "cost_unconfirmed": self.unconfirmed.cost(price),
        }
        return {name: float(value) for name, value in values.items() if value is not None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Spending:
        usages = {name: TokenUsage(**data[name]) for name in ("counted", "unconfirmed")}
        return cls(**{**data, **usages})


@dataclass(eq=False)
class Reservation:
    """The part of a budget that is set aside for one request. Until it is settled, it counts with its maximum."""

    account: str
    """Name under which the request is recorded."""
    is_retry: bool
    maximum: TokenUsage
    """Upper bound of the tokens of the request."""
    usage: TokenUsage | None = None
    """Tokens that the provider reported; None until the reservation is settled."""

    def settle(self, usage: TokenUsage) -> None:
        """Set the usage that the provider reported; zero tokens where it did not answer the request."""
        self.usage = usage

    @property
    def spending(self) -> Spending:
        """Spending of the request, with the upper bound of its tokens until the reservation is settled."""
        if self.usage is None:
            return Spending(1, int(self.is_retry), unconfirmed_requests=1, unconfirmed=self.maximum)
        return Spending(1, int(self.is_retry), self.usage)


@dataclass(eq=False)
class Budget:
    """Limits of the spending on requests, and the spending per account. Several event loops may share one budget."""

    key: str
    """Section of the configuration that has `price` and `budget`."""
    price: PriceConfig
    limits: BudgetConfig
    path: Path | None = None
    """File that stores the spending; None: it is not stored. Only one process at a time may write the file."""
    limit_keys: Mapping[str, str] = field(default_factory=dict)
    """Configuration keys of limits, by limit, where the key is not `<key>.budget.<limit>`."""
    closed: UserError | None = None
    """Error that every further request raises; None while requests are accepted."""
    spending: defaultdict[str, Spending] = field(default_factory=lambda: defaultdict(Spending), init=False)
    """Spending by account, without requests in flight."""
    _reservations: list[Reservation] = field(default_factory=list, init=False)
    """Reservations of requests in flight."""
    _waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = field(default_factory=list, init=False)
    """Event loops and futures of the calls that wait until a reservation is settled."""
    _lock: threading.RLock = field(default_factory=threading.RLock, init=False)

    def __post_init__(self) -> None:
        """Read the earlier spending from the file.

        Raises:
            UserError: the file cannot be read, or is not one that a budget wrote.
        """
        self.spending.update(_read(self.path))

    def store(self, path: Path) -> None:
        """Store the spending in this file from the next request on, and count the earlier spending that it holds.

        Raises:
            UserError: the file cannot be read, or is not one that a budget wrote.
        """
        with self._lock:
            for account, earlier in _read(path).items():
                self.spending[account] += earlier
            self.path = path

    @property
    def in_flight(self) -> tuple[Reservation, ...]:
        """Reservations of the requests in flight."""
        return tuple(self._reservations)

    @property
    def total(self) -> Spending:
        """Spending of all accounts, without requests in flight."""
        return sum(self.spending.values(), Spending())

    def metrics(self) -> dict[str, float]:
        """Return `Spending.metrics` of the total."""
        with self._lock:
            return self.total.metrics(self.price)

    @asynccontextmanager
    async def reserve(self, account: str, maximum: TokenUsage, is_retry: bool = False) -> AsyncIterator[Reservation]:
        """Reserve the maximum cost of one request while the body of the context runs, then record its spending.

        If requests in flight may use up the rest of the budget, the call first waits for them.

        Args:
            account: name under which the request is recorded.
            maximum: upper bound of the tokens of the request.
            is_retry: whether the request repeats a failed one.

        Raises:
            BudgetSpentError: the rest of the budget is too small; every further request raises this error.
            UserError: the file cannot be written.
        """
        reservation = Reservation(account, is_retry, maximum)
        while (settled := self._try_reserve(reservation)) is not None:
            await settled
        try:
            yield reservation
        finally:
            self._record(reservation)

    def _try_reserve(self, reservation: Reservation) -> asyncio.Future[None] | None:
        """Enter the reservation and return None, or return a future to wait for before the next attempt."""
        import asyncio  # imported here, because the configuration checks use only the limits of this module

        with self._lock:
            with_request = self.total + reservation.spending
            if self.closed is None and (limit := self._exceeded_limit(with_request)) is not None:
                self.closed = self._spent_error(limit)
            if self.closed is not None:
                raise self.closed
            if self._exceeded_limit(sum((other.spending for other in self._reservations), with_request)) is not None:
                loop = asyncio.get_running_loop()
                self._waiting.append((loop, loop.create_future()))
                return self._waiting[-1][1]
            self._reservations.append(reservation)
            self._write()
            if self.closed is not None:
                self._reservations.remove(reservation)
                raise self.closed
            return None

    def _record(self, reservation: Reservation) -> None:
        """Add the spending of the request to its account, end the reservation, and wake the calls that wait."""
        with self._lock:
            self._reservations.remove(reservation)
            self.spending[reservation.account] += reservation.spending
            self._write()
            waiting, self._waiting = self._waiting, []
        for loop, future in waiting:
            with suppress(RuntimeError):  # the loop is closed, so that no task of it waits any more
                loop.call_soon_threadsafe(_wake, future)

    def _exceeded_limit(self, spending: Spending) -> str | None:
        """Return the name of the limit that this spending exceeds; None if it exceeds none."""
        cost = (spending.counted + spending.unconfirmed).cost(self.price)
        values = {"usd": cost, "requests": spending.requests, "tokens": spending.tokens}
        for limit, value in values.items():
            maximum = getattr(self.limits, limit)
            if maximum is not None and value is not None and value > maximum:
                return limit
        return None

    def _spent_error(self, limit: str) -> BudgetSpentError:
        key = self.limit_keys.get(limit, f"{self.key}.budget.{limit}")
        maximum = getattr(self.limits, limit)
        total = format_spending(self.total.metrics(self.price))
        return BudgetSpentError(
            f"{key}={maximum:.12g} is too small for another request, after {total}; raise it to continue"
        )

    def _write(self) -> None:
        """Replace the file atomically, without fsync: data that was written survives a killed process."""
        if self.path is None:
            return
        recorded = {account: asdict(spending) for account, spending in self.spending.items()}
        in_flight = [(each.account, asdict(each.spending)) for each in self._reservations]
        text = json.dumps({"spent": recorded, "on_its_way": in_flight})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, lambda part: part.write_text(text, encoding="utf-8"))
        except OSError as error:
            log.warning("%s cannot be written: %s", self.path, error)
            self.closed = UserError(
                f"{self.path}, which stores the spending of {self.key}, cannot be written ({error.strerror}); free "
                "some space, or name another folder"
            )


def check_spending(
    key: str, price: PriceConfig, limits: BudgetConfig, limit_keys: Mapping[str, str] | None = None
) -> None:
    """Refuse invalid prices and limits of a budget.

    Args:
        key: section of the configuration that has `price` and `budget`.
        limit_keys: see `Budget`.

    Raises:
        UserError: a price is negative, a limit is not positive, a value is not a number, the prices are incomplete, or
            a limit is in USD without a price.
    """
    for name, value in asdict(price).items():
        if value is not None and not (_is_number(value) and value >= 0):
            raise UserError(f"{key}.price.{name}={value} must be USD per million tokens, at least 0, or null")
    for limit, value in asdict(limits).items():
        limit_key = (limit_keys or {}).get(limit, f"{key}.budget.{limit}")
        if value is not None and not (_is_number(value) and value > 0):
            raise UserError(f"{limit_key}={value} must be more than 0, or null for no limit")
    if (price.input is None) != (price.output is None) or (price.cached is not None and price.input is None):
        missing = "input" if price.input is None else "output"
        raise UserError(f"{key}.price.{missing} is not given, and the others are; a cost needs input and output")
    if limits.usd is not None and price.input is None:
        raise UserError(
            f"{key}.budget.usd={limits.usd} needs {key}.price.input and {key}.price.output, in USD per million tokens"
        )


def maximum_usage(body: Mapping[str, Any]) -> TokenUsage | None:
    """Return an upper bound of the tokens of a request; None where the request has no limit of completion tokens.

    The bound of messages is their size in bytes, since no token is shorter than a byte. A prompt of ids has as many
    tokens as ids. Of two limits of completion tokens the larger one counts, since some servers read only one of them.
    """
    limits = [body.get("max_completion_tokens"), body.get("max_tokens")]
    limit = max((value for value in limits if _is_number(value) and value > 0), default=None)
    messages = body.get("messages") or []
    content = json.dumps([messages, body.get("tools")], ensure_ascii=False).encode(errors="replace")
    ids = body.get("prompt") or []  # of a completions API
    prompt = len(content) + FRAME + PER_MESSAGE * len(messages) + len(ids)
    choices = body.get("n") if _is_number(body.get("n")) else 1
    return None if limit is None else TokenUsage(prompt, 0, math.ceil(limit * max(1, choices)))  # type: ignore[type-var]


def format_spending(metrics: Mapping[str, float]) -> str:
    """Format `Spending.metrics` as one line: `10,000 prompt tokens (300 cached), 5,000 completion tokens, 1,203
    requests (3 repeated), 0.0412 USD`."""
    text = (
        f"{metrics['prompt_tokens']:,.0f} prompt tokens ({metrics['cached_tokens']:,.0f} cached), "
        f"{metrics['completion_tokens']:,.0f} completion tokens, {metrics['requests']:,.0f} requests "
        f"({metrics['retries']:,.0f} repeated)"
    )
    if "cost" in metrics:
        text += f", {format_usd(metrics['cost'])}"
    if unconfirmed := metrics["unconfirmed_requests"]:
        more = f", at most {format_usd(metrics['cost_unconfirmed'])} more" if "cost_unconfirmed" in metrics else ""
        text += f", and {unconfirmed:,.0f} of the requests without a count of tokens{more}"
    return text


def format_usd(cost: float) -> str:
    """Format a cost in USD: with cents from 1 USD on (and for 0), else with three significant digits."""
    return f"{cost:,.2f} USD" if cost >= 1 or cost == 0 else f"{cost:.3g} USD"


def _read(path: Path | None) -> dict[str, Spending]:
    """Read the spending by account from a file. Requests that were in flight count with their upper bound."""
    if path is None:
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        spending: defaultdict[str, Spending] = defaultdict(Spending)
        for account, part in [*content["spent"].items(), *content["on_its_way"]]:
            spending[str(account)] += Spending.from_dict(part)
        return spending
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}, which stores the spending, cannot be read ({type(error).__name__}); repair it, or remove it to "
            "count from zero"
        ) from error


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
