"""Parameters of a judge (`mtrl.rewards.judge.judge`), which are checked before the first episode."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import httpx
from omegaconf import OmegaConf

from mtrl.config.endpoint_schema import BudgetConfig, EndpointConfig, PriceConfig
from mtrl.config.outputs import check_local
from mtrl.engines.endpoints.budget import Budget, check_spending
from mtrl.engines.endpoints.chat_client import Address, api_key, check_bounds
from mtrl.errors import UserError
from mtrl.utils.strict_json import canonical


@dataclass
class JudgeSettings:
    """Parameters of a judge; see `judge` for their meaning."""

    url: str
    model: str
    rubric: str
    price: Any
    budget: Any
    cache: str | None
    api_key_env: str | None
    show: Any
    options: Any
    timeout: float
    attempts: int
    backoff: float
    concurrency: int
    name: str

    def __post_init__(self) -> None:
        """Convert and check the parameters.

        Raises:
            UserError: a parameter is wrong, or the environment variable holds no key.
        """
        self._check_texts()
        self._check_numbers()
        self.show = (self.show,) if isinstance(self.show, str) else plain(self.show)
        if not isinstance(self.show, list | tuple) or not all(isinstance(key, str) for key in self.show):
            raise UserError(f"{self.where}.show={self.show} must be a key of the row, or a list of such keys")
        self.show = tuple(self.show)
        self._check_options()
        self._check_address()
        check_local(f"{self.where}.cache={self.cache}", self.cache)
        budget = Budget(self.where, self.endpoint.price, self.endpoint.budget)
        check_spending(self.where, budget.price, budget.limits, self.limit_keys)
        check_bounds({"messages": [], **self.options}, budget, f"{self.where}.options")
        self._check_key()

    @property
    def text(self) -> str:
        """Canonical text of all parameters, which is equal for equal parameters."""
        return canonical({f.name: plain(getattr(self, f.name)) for f in fields(self)})

    @property
    def where(self) -> str:
        return f"reward.components.{self.name}"

    @property
    def limit_keys(self) -> dict[str, str]:
        """Names of keys for error messages about limits: a budget that is a number is the limit of requests."""
        return {} if isinstance(self.budget, Mapping) else {"requests": f"{self.where}.budget"}

    @cached_property
    def endpoint(self) -> EndpointConfig:
        budget = self.budget if isinstance(self.budget, Mapping) else {"requests": self.budget}
        return EndpointConfig(
            api_key_env=self.api_key_env or "",
            timeout=self.timeout,
            retries=self.attempts - 1,
            max_concurrent=self.concurrency,
            price=_section(PriceConfig, f"{self.where}.price", self.price or {}),
            budget=_section(BudgetConfig, f"{self.where}.budget", budget),
        )

    @property
    def address(self) -> Address:
        return Address(self.model, self.url)

    def _check_texts(self) -> None:
        for key in ("name", "model", "rubric", "cache", "api_key_env"):
            value = getattr(self, key)
            if value is None and key in ("cache", "api_key_env"):
                continue
            if not isinstance(value, str):
                shown = "null" if value is None else value
                raise UserError(f"{self.where}.{key}={shown} is not text; write one in quotes, or leave the key out")
            if not value.strip():
                raise UserError(f"{self.where}.{key} is empty; the judge needs one")

    def _check_numbers(self) -> None:
        for key, kind, what in (
            ("timeout", int | float, "must be more than 0"),
            ("backoff", int | float, "must be at least 0"),
            ("attempts", int, "must be a whole number of at least 1"),
            ("concurrency", int, "must be a whole number of at least 1"),
        ):
            value = getattr(self, key)
            is_number = isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or value < 0 or (value == 0 and key != "backoff"):
                raise UserError(f"{self.where}.{key}={value!r} {what}")

    def _check_options(self) -> None:
        self.options = {"temperature": 0} if self.options is None else plain(self.options)
        if not isinstance(self.options, Mapping):
            raise UserError(f"{self.where}.options={self.options} must hold further keys of the request, by name")
        fixed = {"model": "the judge sets it from its model", "messages": "the judge writes them"}
        for key, why in {**fixed, "stream": "answers are read as a whole"}.items():
            if key in self.options:
                raise UserError(f"{self.where}.options.{key} cannot be set, because {why}; leave it out")

    def _check_address(self) -> None:
        try:
            address = httpx.URL(self.url)
        except (httpx.InvalidURL, TypeError):
            address = httpx.URL()
        if address.userinfo:
            raise UserError(f"{self.where}.url holds a password; write it without, and name api_key_env")
        if address.scheme not in ("http", "https") or not address.host:
            raise UserError(f"{self.where}.url={self.url} is no address; write http://host:port/v1")

    def _check_key(self) -> None:
        if self.api_key_env is None:
            return
        key = api_key(self.endpoint)
        if not key or not key.isascii() or not key.isprintable():
            what = "is not set" if not key else "holds no API key"
            raise UserError(f"{self.where}.api_key_env={self.api_key_env}: the environment variable {what}")


def _section(kind: Any, key: str, values: Any) -> Any:
    """Build the dataclass `kind` from a section of the configuration.

    Raises:
        UserError: the section is not a mapping, or a key is unknown.
    """
    known = [f.name for f in fields(kind)]
    values = plain(values)
    if not isinstance(values, Mapping) or set(values) - set(known):
        raise UserError(f"{key}={values} is not understood; it takes {', '.join(known)}")
    return kind(**values)


def plain(value: Any) -> Any:
    """Convert OmegaConf's containers to plain dicts and lists; other values are returned unchanged."""
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
