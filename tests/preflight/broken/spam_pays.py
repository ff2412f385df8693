"""Every tool call is rewarded."""

from tests.preflight.broken.sound import Lookup, family


class Spam(Lookup):
    def pay_look(self):
        return 0.2


FAMILY = family(Spam)
