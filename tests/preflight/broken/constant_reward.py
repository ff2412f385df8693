"""The weak player is never paid: groups of it teach nothing."""

from types import SimpleNamespace

from tests.preflight.broken.sound import Lookup, family


def demonstrate(row, rng):
    return SimpleNamespace(act=lambda observation: "<final_output>12321</final_output>")


FAMILY = family(Lookup, demonstrate=demonstrate)
