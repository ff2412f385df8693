"""The weak player is never paid: groups of it teach nothing."""

from types import SimpleNamespace

from mtrl.datasets import Splits
from tests.preflight.broken.sound import Lookup, family, make_row


def load(data, seed, **config):
    """More rows than the weak player plays."""
    return Splits([make_row(n, "train") for n in range(120)], [make_row(n, "test") for n in range(120, 150)])


def demonstrate(row, rng):
    return SimpleNamespace(act=lambda observation: "<final_output>12321</final_output>")


FAMILY = family(Lookup, load=load, demonstrate=demonstrate)
