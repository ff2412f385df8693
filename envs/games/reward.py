"""What a turn is paid."""

from __future__ import annotations

from mtrl.errors import UserError

SCHEMES = ("default", "progress", "guide")
PROGRESS_BUDGET = 0.2
"""Under `progress`, less than this is paid in all before the game is solved."""
GUIDE_SHARE = 0.1


class EpisodeReward:
    """Pays the turns of one episode.

    - `default`: 1.0 for solving the game, in whichever turn.
    - `progress`: each new best is paid its part of 0.2, and solving 1.0 less what was paid: always 1.0 in all.
    - `guide`: the guide's "intermediate progress": solved 1.0; in the last turn the progress; before a tenth of it.
      Waiting close to the goal is paid again every turn, so a policy that can solve the game is paid to stall.
    """

    def __init__(self, scheme: str):
        if scheme not in SCHEMES:
            raise UserError(f"reward.scheme={scheme} is not known to games; choose one of {', '.join(SCHEMES)}")
        self.scheme = scheme
        self.paid = 0.0

    def pay(self, progress: float, solved: bool, done: bool) -> dict[str, float]:
        """The components of this turn's reward, which is their sum. `progress` is 0.0 to 1.0 and 0.0 if malformed."""
        if solved:
            return {"solved": 1.0 - self.paid, "progress": 0.0}
        if self.scheme == "guide":
            return {"solved": 0.0, "progress": progress * (1.0 if done else GUIDE_SHARE)}
        if self.scheme == "progress":
            gain = max(0.0, PROGRESS_BUDGET * progress - self.paid)
            self.paid += gain
            return {"solved": 0.0, "progress": gain}
        return {"solved": 0.0, "progress": 0.0}
