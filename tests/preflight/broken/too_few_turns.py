"""The lookups of a solution take more turns than an episode has."""

from tests.preflight.broken import sound


def gold(row):
    look, answer = sound.gold(row)
    return [look] * 7 + [answer]


FAMILY = sound.family(sound.Lookup, gold=gold)
