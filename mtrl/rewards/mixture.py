"""The rewards of a run: one composition, or one for each source of a mixture."""

from __future__ import annotations

from collections.abc import Mapping

from mtrl.config.mixture import in_source, source_configs, source_of
from mtrl.config.schema import Config
from mtrl.rewards.compose import RewardComposer
from mtrl.types import Group


def make_composer(config: Config) -> RewardComposer:
    """Return the composition of `reward`, or of a mixture.

    Raises:
        UserError: see `RewardComposer`.
    """
    own = {}
    for name, source in source_configs(config).items():
        with in_source(name):
            own[name] = RewardComposer(source.reward)
    return MixedComposer(own) if own else RewardComposer(config.reward)


class MixedComposer(RewardComposer):
    """Applies to each group the composition of its source."""

    def __init__(self, composers: Mapping[str, RewardComposer]):
        self.composers = composers
        self.components = [component for own in composers.values() for component in own.components]
        """Components of all sources."""
        self.compares = any(own.compares for own in composers.values())

    def of(self, group: Group) -> RewardComposer:
        """See `RewardComposer.of`."""
        return self.composers[source_of(str(group.row["id"]))]

    async def apply_async(self, group: Group) -> None:
        """See `RewardComposer.apply_async`."""
        await self.of(group).apply_async(group)

    def check(self) -> None:
        """See `RewardComposer.check`; a source without an episode so far passes."""
        for name, own in self.composers.items():
            with in_source(name):
                own.check()
