"""Every turn after the second lowers the reward, so that a policy answers before it has looked everywhere."""

from tests.preflight.broken.sound import Lookup, family


class Hurry(Lookup):
    def step(self, response, ground_truth):
        result = super().step(response, ground_truth)
        result.reward -= 0.05 * (self.current_turn > 2)
        return result


FAMILY = family(Hurry)
