"""The sound task, which each of the other modules breaks in one place: look up a word and answer with its code."""

import re
from types import SimpleNamespace

from mtrl.datasets import Splits
from mtrl.environments.base import BaseEnvironment, StepResult
from mtrl.environments.family import Family

PROMPT = (
    "What is the code of {word}? <look>WORD</look> shows the code of a word. End with your answer as "
    "<final_output>CODE</final_output>."
)
CODES = {f"word{n}": f"{(n * 7919 + 12345) % 90000 + 10000}" for n in range(200)}


def make_row(number, split, **more):
    word = f"word{number}"
    prompt = [{"role": "user", "content": PROMPT.format(word=word)}]
    return {"id": f"{split}-{number}", "prompt": prompt, "ground_truth": {"word": word, "answer": CODES[word]}, **more}


def load(data, seed, **config):
    return Splits([make_row(n, "train") for n in range(40)], [make_row(n, "test") for n in range(40, 70)])


def gold(row):
    truth = row["ground_truth"]
    return [f"<look>{truth['word']}</look>", f"<final_output>{truth['answer']}</final_output>"]


def demonstrate(row, rng):
    """Return a demonstrator that is right in half of its episodes."""
    moves = iter(gold(row) if rng.random() < 0.5 else ["<final_output>12321</final_output>"])
    return SimpleNamespace(act=lambda observation: next(moves, ""))


def score(trajectory, row):
    """Return 1.0 for exactly the right answer, without the environment's regular expressions."""
    said = [m["content"] for m in trajectory.messages if m["role"] == "assistant"]
    answer = f"<final_output>{row['ground_truth']['answer']}</final_output>"
    return float(bool(said) and said[-1].strip() == answer)


class Lookup(BaseEnvironment):
    ANSWER = re.compile(r"\s*<final_output>(\d+)</final_output>\s*")
    LOOK = re.compile(r"\s*<look>(\w+)</look>\s*")

    def step(self, response, ground_truth):
        self.current_turn += 1
        out_of_turns = self.current_turn >= self.max_turns
        if answer := self.ANSWER.fullmatch(response):
            return StepResult(self.pay(answer[1], ground_truth), None, done=True)
        if look := self.LOOK.fullmatch(response):
            return StepResult(self.pay_look(), self.show(look[1]), out_of_turns, truncated=out_of_turns)
        return StepResult(self.pay_rest(), "look or answer", out_of_turns, truncated=out_of_turns)

    def pay(self, answer, ground_truth):
        return float(answer == ground_truth["answer"])

    def pay_look(self):
        return 0.0

    def pay_rest(self):
        return 0.0

    def show(self, word):
        return CODES.get(word, "no such word")


def family(environment, **changes):
    parts = {"load": load, "score": score, "gold": gold, "demonstrate": demonstrate, **changes}
    return Family(name=environment.__name__, environment=environment, **parts)


FAMILY = family(Lookup)
