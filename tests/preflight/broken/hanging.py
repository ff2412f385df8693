"""A tool that never returns for an unknown word."""

import time

from tests.preflight.broken.sound import CODES, Lookup, family


class Hanging(Lookup):
    def show(self, word):
        if word not in CODES:
            time.sleep(3600)
        return super().show(word)

    def pay_rest(self):
        time.sleep(3600)


FAMILY = family(Hanging)
