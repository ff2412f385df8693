"""The reward of any answer in the right form is nearly that of a right answer."""

from tests.preflight.broken.sound import Lookup, family


class FormatPays(Lookup):
    def pay(self, answer, ground_truth):
        return 1.0 if answer == ground_truth["answer"] else 0.8


FAMILY = family(FormatPays)
