"""A ground truth that no response can match, because answers are parsed into another form."""

from mtrl.datasets import Splits
from tests.preflight.broken import sound


def load(data, seed, **config):
    splits = sound.load(data, seed)
    for row in (*splits.train, *splits.test):
        row["ground_truth"]["answer"] += " "
    return Splits(splits.train, splits.test)


FAMILY = sound.family(sound.Lookup, load=load)
