"""Reward and scorer accept the right answer anywhere among other answers."""

import re

from tests.preflight.broken.sound import Lookup, family


class Stuffing(Lookup):
    ANSWER = re.compile(r"\s*<final_output>([^<]*)</final_output>\s*")

    def pay(self, answer, ground_truth):
        return float(ground_truth["answer"] in answer)


def score(trajectory, row):
    last = trajectory.messages[-1] if trajectory.messages else {"content": ""}
    text = last["content"].strip()
    inside = text.removeprefix("<final_output>").removesuffix("</final_output>")
    is_whole = len(text) - len(inside) == len("<final_output></final_output>") and "<" not in inside
    return float(is_whole and row["ground_truth"]["answer"] in inside)


FAMILY = family(Stuffing, score=score)
