"""A response without a tag raises an error in the environment."""

from tests.preflight.broken.sound import Lookup, family


class Crashing(Lookup):
    def pay_rest(self):
        raise KeyError("no tag")


FAMILY = family(Crashing)
