"""A task with every unusual event that can happen in an episode. The response decides which event happens."""

import time
from typing import Literal

from mtrl.datasets import Splits
from mtrl.environments.base import BaseEnvironment, StepResult
from mtrl.environments.family import Family
from mtrl.environments.tools import ToolEnvironment, tool


class Awkward(BaseEnvironment):
    def step(self, response, ground_truth):
        self.current_turn += 1
        if response == "hang":
            time.sleep(3600)
        if response == "raise":
            raise RuntimeError("no disk\nmore")
        if response == "nan":
            return float("nan"), None, True
        if response == "escape":
            return 0.0, "\x1b[2J\x1b[31mred", False
        if response == "disagree":
            return 1.0, None, True
        if response == "right":
            return StepResult(1.0, None, True, components={"style": 0.5}, metrics={"looks": 2.0})
        return 0.25, f"heard {len(response)} characters, {response.count(chr(10))} line breaks", False


class Tools(ToolEnvironment):
    @tool
    def price(self, item: Literal["tea", "rye"]) -> int:
        """Return the price of an item, in cents."""
        return {"tea": 5, "rye": 7}[item]

    def answer(self, response, ground_truth):
        return float(response == "12"), None, True


def load(data, seed, **config):
    rows = [
        {"id": f"{split}-{n}", "prompt": [{"role": "user", "content": f"say right {n}"}], "ground_truth": {"answer": n}}
        for split, count in (("train", 3), ("test", 2))
        for n in range(count)
    ]
    return Splits(rows[:3], rows[3:])


def score(trajectory, row):
    if trajectory.turns[-1].text == "scorer":
        raise ZeroDivisionError("no scorer today")
    return float(trajectory.turns[-1].text in ("right", "12"))


FAMILY = Family("awkward", Awkward, load, score, gold=lambda row: ["look", "right"])
GOLDLESS = Family("goldless", Awkward, load, score)
UNTESTED = Family("untested", Awkward, lambda *_, **config: Splits(load(None, 0).train, []), score)
WITH_TOOLS = Family("tools", Tools, load, score)
