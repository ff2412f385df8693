"""Looking up takes more turns than there are."""

from tests.preflight.broken import sound


def gold(row):
    look, answer = sound.gold(row)
    return [look] * 7 + [answer]


FAMILY = sound.family(sound.Lookup, gold=gold)
