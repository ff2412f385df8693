"""The reward converts every answer that begins with a digit, so a full stop after the number breaks the episode."""

import re

from tests.preflight.broken.sound import Lookup, family


class CrashingOnAnswers(Lookup):
    ANSWER = re.compile(r"\s*<final_output>(\d.*)</final_output>\s*")

    def pay(self, answer, ground_truth):
        return float(int(answer) == int(ground_truth["answer"]))


FAMILY = family(CrashingOnAnswers)
