"""A division by zero: the reward of a wrong answer is NaN."""

from tests.preflight.broken.sound import Lookup, family


class NotFinite(Lookup):
    def pay(self, answer, ground_truth):
        return 1.0 if answer == ground_truth["answer"] else float("nan")


FAMILY = family(NotFinite)
