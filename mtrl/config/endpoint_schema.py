"""Settings of models that are asked over OpenAI's chat API, and what asking them may cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class PriceConfig:
    """USD per million tokens. Null: not known; tokens are counted all the same, and no cost is claimed."""

    input: float | None = None
    """Of the prompt."""
    cached: float | None = None
    """Of what the provider found in its prefix cache; null: as input."""
    output: float | None = None
    """Of the answer, its reasoning included."""


@dataclass
class BudgetConfig:
    """Nothing more is asked where the next request, at its worst, could go beyond one of these. Null: no limit."""

    usd: float | None = None
    """Needs a price."""
    requests: int | None = None
    """Every attempt counts."""
    tokens: int | None = None
    """Of prompts and answers together."""


@dataclass
class EndpointConfig:
    """How an OpenAI-compatible endpoint is asked, in evaluations and baselines."""

    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key."""
    timeout: float = 120.0
    """Seconds that one answer may take."""
    retries: int = 4
    """Further attempts after an answer that says to try again (429, 5xx) or none at all."""
    max_concurrent: int = 8
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Further keys of every request."""
    price: PriceConfig = field(default_factory=PriceConfig)
    """Of every endpoint of an evaluation."""
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    """For all endpoints of an evaluation together, however often it is gone on with."""
