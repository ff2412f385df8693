"""The form of an answer gets half of the reward. The demonstrator is right in a fifth of its episodes, so that the form
is worth more than success."""

from types import SimpleNamespace

from tests.preflight.broken.sound import Lookup, family, gold


class HalfForForm(Lookup):
    def pay(self, answer, ground_truth):
        return 1.0 if answer == ground_truth["answer"] else 0.5


def demonstrate(row, rng):
    """Return a demonstrator that is right in every fifth episode, and otherwise breaks the form."""
    moves = iter(gold(row) if int(row["id"].split("-")[1]) % 5 == 0 else ["it is 12321"])
    return SimpleNamespace(act=lambda observation: next(moves, ""))


FAMILY = family(HalfForForm, demonstrate=demonstrate)
