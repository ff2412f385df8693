"""The demonstrator is never rewarded, so that its groups have no advantages."""

from types import SimpleNamespace

from mtrl.datasets import Splits
from tests.preflight.broken.sound import Lookup, family, make_row


def load(data, seed, **config):
    """Return more rows than the pre-flight runs with the demonstrator."""
    return Splits([make_row(n, "train") for n in range(120)], [make_row(n, "test") for n in range(120, 150)])


def demonstrate(row, rng):
    return SimpleNamespace(act=lambda observation: "<final_output>12321</final_output>")


FAMILY = family(Lookup, load=load, demonstrate=demonstrate)
