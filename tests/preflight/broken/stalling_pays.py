"""Every unusable reply is paid a little, four times at most: dawdling, then right, earns more than right at once."""

from tests.preflight.broken.sound import Lookup, family


class Stalling(Lookup):
    def pay_rest(self):
        return 0.02 if self.current_turn <= 4 else 0.0


FAMILY = family(Stalling)
