"""The gap between the log-probs that an engine reported and those of the trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

QUANTILES = (0.5, 0.9, 0.99, 1.0)
EDGES = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Lower edges of the bins of the histogram, in nats; the last bin is open."""
FLOAT32_LIMIT = 1e-3
"""Largest mean gap of a correct engine in float32, in nats."""
HALF_LIMIT = 0.1
"""Largest mean gap of a correct engine in half precision, in nats."""


class DriftStatistics:
    """Statistics of the gaps of all tokens."""

    def __init__(self, engine: Tensor, trainer: Tensor):
        """`engine`, `trainer`: log-probs [N] of the same tokens."""
        self.gaps = (engine.float() - trainer.float()).abs()

    @property
    def mean(self) -> float:
        return self.gaps.mean().item()

    def problem(self, dtype: torch.dtype) -> str:
        """Return why the engine and the trainer disagree, empty if they agree up to the rounding of `dtype`."""
        limit = FLOAT32_LIMIT if dtype == torch.float32 else HALF_LIMIT
        if self.mean <= limit:  # False for NaN
            return ""
        return f"log-probs of engine and trainer differ by {self.mean:.2g} nats on average, more than {limit:g}"

    def line(self) -> str:
        middle, _, high, most = self._quantiles()
        return f"gap {_short(middle)} (median), {_short(high)} (99 %), {_short(most)} (max)"

    def figures(self) -> dict[str, Any]:
        """Return the mean, the quantiles and the histogram."""
        counts = [int((self.gaps >= edge).sum()) for edge in EDGES]
        return {
            "gap_tokens": len(self.gaps),
            "gap_mean_nats": self.mean,
            "gap_quantiles_nats": dict(zip(map(str, QUANTILES), self._quantiles(), strict=True)),
            "gap_histogram": [
                {"from_nats": edge, "tokens": count - above}
                for edge, count, above in zip(EDGES, counts, [*counts[1:], 0], strict=True)
            ],
        }

    def _quantiles(self) -> list[float]:
        ordered = self.gaps.sort().values
        return [ordered[min(len(ordered) - 1, int(q * len(ordered)))].item() for q in QUANTILES]


def _short(gap: float) -> str:
    return f"{gap:.0e}" if gap else "0"
