"""The example in the prompt has another tag than the one that the reward reads."""

from mtrl.datasets import Splits
from tests.preflight.broken import sound


def load(data, seed, **config):
    splits = sound.load(data, seed)
    for row in (*splits.train, *splits.test):
        row["prompt"][0]["content"] = row["prompt"][0]["content"].replace("final_output", "final_response")
    return Splits(splits.train, splits.test)


FAMILY = sound.family(sound.Lookup, load=load)
