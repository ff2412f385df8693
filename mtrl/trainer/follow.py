"""The work of all ranks except the leader."""

from __future__ import annotations

from contextlib import closing

from mtrl.config.schema import FsdpConfig


def follow() -> None:
    """Hold a share of the models and execute the leader's calls, until the leader dismisses the followers.

    Raises:
        JobLost: the leader or another rank is lost.
    """
    from mtrl.distributed.crew import Crew
    from mtrl.distributed.world import World
    from mtrl.trainer.setup.models import make_learner

    with closing(World.join(FsdpConfig.timeout)) as world:
        config, path = world.broadcast(None)
        Crew(world, make_learner(config, world, path)).follow()
