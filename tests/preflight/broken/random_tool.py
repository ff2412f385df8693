"""A tool whose answers to equal calls differ."""

import random

from tests.preflight.broken.sound import Lookup, family


class Random(Lookup):
    def show(self, word):
        return f"{super().show(word)} in {random.randint(1, 10**9)} ms"


FAMILY = family(Random)
