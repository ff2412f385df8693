"""Up to four unusable responses get a small reward each, so that a late right answer gets more than an early one."""

from tests.preflight.broken.sound import Lookup, family


class Stalling(Lookup):
    def pay_rest(self):
        return 0.02 if self.current_turn <= 4 else 0.0


FAMILY = family(Stalling)
