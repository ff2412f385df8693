"""The rewards of turns."""

from __future__ import annotations

from mtrl.errors import UserError

SCHEMES = ("default", "progress", "guide")
PROGRESS_BUDGET = 0.2
"""Upper bound of the total reward before the game is solved, under the scheme `progress`."""
GUIDE_SHARE = 0.1


class EpisodeReward:
    """Computes the rewards of the turns of one episode.

    - `default`: 1.0 for solving the game, in any turn.
    - `progress`: each new best progress receives its part of 0.2, and solving the game receives 1.0 minus the earlier
      rewards, so that the total is always 1.0.
    - `guide`: the guide's "intermediate progress": 1.0 if solved; the progress in the last turn; a tenth of the
      progress in earlier turns. Waiting close to the goal is rewarded again in every turn, so a policy that can solve
      the game is rewarded for stalling.
    """

    def __init__(self, scheme: str):
        if scheme not in SCHEMES:
            raise UserError(f"reward.scheme={scheme} is not known to games; choose one of {', '.join(SCHEMES)}")
        self.scheme = scheme
        self.granted = 0.0

    def components(self, progress: float, solved: bool, done: bool) -> dict[str, float]:
        """Return the components of this turn's reward, which is their sum. `progress` is 0.0 to 1.0, and 0.0 if
        malformed."""
        if solved:
            return {"solved": 1.0 - self.granted, "progress": 0.0}
        if self.scheme == "guide":
            return {"solved": 0.0, "progress": progress * (1.0 if done else GUIDE_SHARE)}
        if self.scheme == "progress":
            gain = max(0.0, PROGRESS_BUDGET * progress - self.granted)
            self.granted += gain
            return {"solved": 0.0, "progress": gain}
        return {"solved": 0.0, "progress": 0.0}
