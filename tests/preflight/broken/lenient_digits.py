"""The reward accepts a longer number that begins with the right one."""

from tests.preflight.broken.sound import Lookup, family


class LenientDigits(Lookup):
    def pay(self, answer, ground_truth):
        return float(answer.startswith(ground_truth["answer"]))


FAMILY = family(LenientDigits)
