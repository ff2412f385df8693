"""An answer that nobody can give: the ground truth is written in another way than answers are read."""

from mtrl.datasets import Splits
from tests.preflight.broken import sound


def load(data, seed, **config):
    splits = sound.load(data, seed)
    for row in (*splits.train, *splits.test):
        row["ground_truth"]["answer"] += " "
    return Splits(splits.train, splits.test)


FAMILY = sound.family(sound.Lookup, load=load)
