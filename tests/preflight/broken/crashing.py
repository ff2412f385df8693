"""A reply without a tag is an error of the environment."""

from tests.preflight.broken.sound import Lookup, family


class Crashing(Lookup):
    def pay_rest(self):
        raise KeyError("no tag")


FAMILY = family(Crashing)
