"""Hard rows, those of the training split, have a higher reward, of which a wrong answer gets a larger share than on
easy rows. On easy rows the difference between a right and a wrong answer is smaller."""

from tests.preflight.broken.sound import CODES, Lookup, family

HARD = {CODES[f"word{n}"] for n in range(40)}


class HardRowsPay(Lookup):
    def pay(self, answer, ground_truth):
        right, wrong = (1.5, 0.9) if ground_truth["answer"] in HARD else (1.0, 0.45)
        return right if answer == ground_truth["answer"] else wrong


FAMILY = family(HardRowsPay)
