"""A result that is stored in the module, which is right only if no other thread looks up a word at the same time."""

import time

from tests.preflight.broken.sound import Lookup, family

desk = {}


class Race(Lookup):
    def show(self, word):
        desk["word"] = word
        time.sleep(0.0003)
        found = super().show(desk["word"])
        desk.clear()
        return found


FAMILY = family(Race)
