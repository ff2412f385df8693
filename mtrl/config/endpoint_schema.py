"""Settings of models behind OpenAI's chat API, with prices and budgets of their requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mtrl.config.field import number


@dataclass
class PriceConfig:
    """Prices in USD per million tokens. Null: not known; tokens are counted, and no cost is reported."""

    input: float | None = number(None, at_least=0)
    """Price of prompt tokens."""
    cached: float | None = number(None, at_least=0)
    """Price of prompt tokens that the provider found in its prefix cache; null: as input."""
    output: float | None = number(None, at_least=0)
    """Price of completion tokens, including reasoning tokens."""


@dataclass
class BudgetConfig:
    """Limits of spending. No request is sent whose maximum cost could exceed one of them. Null: no limit."""

    usd: float | None = number(None, above=0)
    """Maximum cost in USD; it needs a price."""
    requests: int | None = number(None, at_least=1)
    """Maximum number of requests; each retry counts as a request."""
    tokens: int | None = number(None, at_least=1)
    """Maximum number of prompt and completion tokens together."""


@dataclass
class EndpointConfig:
    """Requests to an OpenAI-compatible endpoint, in evaluations and baselines."""

    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key."""
    timeout: float = number(120.0, above=0)
    """Time limit of one response, in seconds."""
    retries: int = number(4, at_least=0)
    """Maximum number of retries of a request without a response or with a response that allows a retry (429, 5xx)."""
    max_concurrent: int = number(8, at_least=1)
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Additional keys of the body of each request."""
    price: PriceConfig = field(default_factory=PriceConfig)
    """Prices of all requests."""
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    """Budget of all requests together, including those before an evaluation or a run was resumed."""
