"""A wrong last answer of at least 600 characters gets 0.9, below the threshold from which a reward claims success. No
answer ends the episode but the right one."""

import re

from tests.preflight.broken.sound import Lookup, family


class Thorough(Lookup):
    ANSWER = re.compile(r".*<final_output>(\d+)</final_output>\s*", re.DOTALL)

    def step(self, response, ground_truth):
        result = super().step(response, ground_truth)
        if result.done and not result.truncated and not result.reward:
            result.done = result.truncated = self.current_turn >= self.max_turns
            if result.done and len(response) >= 600:
                result.reward = 0.9
        return result


def score(trajectory, row):
    """Return 1.0 if the last response ends with the right answer."""
    answer = f"<final_output>{row['ground_truth']['answer']}</final_output>"
    return float(bool(trajectory.turns) and trajectory.turns[-1].text.rstrip().endswith(answer))


FAMILY = family(Thorough, score=score)
