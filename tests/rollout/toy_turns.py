"""Episodes of several turns that an engine of the toy model samples. Not a test."""

import os
from contextlib import asynccontextmanager

from mtrl.rollout.episode import BaseLoop, EpisodeLimits, Occupancy
from mtrl.types import FinishReason, StopReason, Turn
from tests.engines.server.toy_servers import CONTEXT, PROMPT, VOCABULARY, check_turn


class ToyTurns(BaseLoop):
    """Each turn continues after the tokens of the turn before, and is checked token by token."""

    def __init__(self, engine, turns=3):
        self.engine, self.sampling_clock, self.turns = engine, Occupancy(), turns
        self.limits = EpisodeLimits(turns, CONTEXT, 3600.0, 3600.0, 0)

    @asynccontextmanager
    async def _open_trajectory(self, trajectory_id, sampling):
        try:
            yield trajectory_id
        finally:
            self.engine.release(trajectory_id)

    async def _run_episode(self, trajectory, trajectory_id, row, sampling):
        prompt = [*PROMPT, int(row["id"]) % VOCABULARY]
        for _ in range(self.turns):
            turn = await self.engine.generate(trajectory_id, prompt, sampling)
            check_turn(turn, prompt, sampling)
            spans, ids = turn.version_spans, turn.token_ids
            trajectory.turns.append(Turn(list(prompt), ids, turn.logprobs, spans, FinishReason.STOP, "", {}))
            prompt = [*prompt, *ids, 5]
        trajectory.metrics["pid"] = os.getpid()
        trajectory.stop_reason = StopReason.DONE

    async def close(self):
        """Do nothing: the episodes share nothing."""
