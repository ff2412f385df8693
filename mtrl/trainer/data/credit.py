"""Advantages of a step's groups by an estimator without a critic, with a batch of its own for each source of a
mixture."""

from __future__ import annotations

from collections.abc import Sequence

from mtrl.algorithms.advantages import turn_advantages
from mtrl.algorithms.batch import Ragged
from mtrl.config.schema import AlgorithmConfig
from mtrl.rewards.compose import RewardComposer
from mtrl.types import Group


def advantages_of(groups: Sequence[Group], config: AlgorithmConfig, composer: RewardComposer) -> list[Ragged]:
    """Return the advantage of each turn, as `turn_advantages` does. The groups of one source of a mixture are a batch,
    so that estimators which normalise over the batch compare only rewards of one composition."""
    batches: dict[int, list[int]] = {}
    for place, group in enumerate(groups):
        batches.setdefault(id(composer.of(group)), []).append(place)
    found: dict[int, Ragged] = {}
    for places in batches.values():
        batch = [groups[place] for place in places]
        found |= zip(places, turn_advantages(batch, config, composer.of(batch[0]).weights), strict=True)
    return [found[place] for place in range(len(groups))]
