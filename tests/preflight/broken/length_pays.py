"""Long responses are rewarded, even if they are wrong."""

import re

from tests.preflight.broken.sound import Lookup, family


class Length(Lookup):
    ANSWER = re.compile(r".*<final_output>(\d+)</final_output>\s*", re.DOTALL)

    def step(self, response, ground_truth):
        result = super().step(response, ground_truth)
        if result.done and not result.reward:
            result.reward = min(len(response), 50_000) / 250_000
        return result


FAMILY = family(Length, score=lambda trajectory, row: float(row["ground_truth"]["answer"] in trajectory.turns[-1].text))
