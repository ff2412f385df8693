"""Any answer in the right form gets the full reward, and the task has no scorer of its own, so that reward and scorer
agree."""

from types import SimpleNamespace

from mtrl.environments.family import reward_is_success
from tests.preflight.broken.sound import Lookup, family, gold


class AnyAnswerCounts(Lookup):
    def pay(self, answer, ground_truth):
        return 1.0


def demonstrate(row, rng):
    """Return a demonstrator that answers in half of its episodes."""
    moves = iter(gold(row) if rng.random() < 0.5 else [])
    return SimpleNamespace(act=lambda observation: next(moves, ""))


FAMILY = family(AnyAnswerCounts, score=reward_is_success, demonstrate=demonstrate)
