"""Does mtrl learn as fast as TRL, step for step? The reward of a random policy is the share of its tokens that
are in one half of the vocabulary's words; it learns until the mean reward of a step is 0.95.

Both sides start from the same weights and prompts, with GRPO's advantages, the clipped loss as a mean over tokens, no
KL, AdamW and one update per step. `trl.py --learning` compares them; this script alone is mtrl's side:

    python benchmarks/trl_learning.py lessons.json results.json
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from step import TOOL_FRAME, Bench, Hashed, Sizes
from step import parse as parse_sizes
from trl_step import Way, share
from trl_task import make_job, text_of, words_of

SMALL = (
    "--hidden-size 64 --intermediate-size 128 --layers 2 --heads 2 --kv-heads 1 --tokens 16 --prompts 8 --group-size 8"
)


@dataclass(frozen=True)
class Lesson:
    """What both sides learn."""

    words: list[str]
    """Options of `step.py`: the sizes, the seed, and what is mtrl's alone."""
    lr: float
    enough: float
    """Mean reward that ends it."""
    most: int
    """Steps after which it is given up."""

    @property
    def sizes(self) -> Sizes:
        sizes, _ = parse_sizes(self.words)
        return sizes

    @property
    def taught(self) -> list[str]:
        return words_of(self.sizes)[::2]

    def job(self, folder: Path) -> dict[str, Any]:
        """The same for TRL."""
        sizes = self.sizes
        way = Way("float32", sizes.prompts * sizes.group_size)
        return make_job(sizes, way, self.most, folder, lr=self.lr, taught=self.taught, enough=self.enough)


class Pupil(Hashed):
    """Pays for the words that are taught."""

    def __init__(self, max_turns: int, observation: str, taught: list[str], tokens: int):
        super().__init__(max_turns, observation, seed=0)
        self.taught, self.tokens = taught, tokens

    def step(self, response: str, ground_truth: dict[str, Any]) -> tuple[float, str, bool]:
        _, observation, done = super().step(response, ground_truth)
        return share(self.taught, response, self.tokens), observation, done


class Class(Bench):
    """Steps of `step.py`, until a mean reward is enough."""

    def __init__(self, lesson: Lesson):
        sizes = replace(lesson.sizes, steps=lesson.most)
        super().__init__(sizes)
        self.lesson = lesson
        self.rewards: list[float] = []
        self.config.trainer.optimizer.lr = lesson.lr
        observation = text_of(sizes, sizes.tool_tokens - TOOL_FRAME, 0)
        tokens = sizes.turns * sizes.tokens
        self.rollouts.loop.make_environment = partial(Pupil, sizes.turns, observation, lesson.taught, tokens)

    async def learn(self) -> list[float]:
        """The mean reward of every step."""
        while len(self.rewards) < self.lesson.most and max(self.rewards, default=0.0) < self.lesson.enough:
            await self._step(len(self.rewards))
        await self.engine.close()
        self.pool.close()
        return self.rewards

    def _samples(self, report: Any) -> Any:
        rewards = [trajectory.reward for group in report.groups for trajectory in group.trajectories]
        self.rewards.append(sum(rewards) / len(rewards))
        return super()._samples(report)


def steps_until(rewards: list[float], enough: float) -> int | None:
    """Updates before the first step whose mean reward is `enough`; None where there is none."""
    return next((step for step, reward in enumerate(rewards) if reward >= enough), None)


def compare(trl: list[list[float]], mtrl: list[list[float]], lesson: Lesson) -> dict[str, Any]:
    """Return the mean rewards of every seed by both, and their steps; a seed that gave up counts as all steps plus one.

    `ahead` is mtrl's reward less TRL's of every seed, as a mean over the steps that all runs had: steps until a
    threshold are few and whole numbers, and say less about two sides that are close.
    """
    sides = {"TRL": trl, "mtrl": mtrl}
    took = {
        side: [lesson.most + 1 if (found := steps_until(run, lesson.enough)) is None else found for run in runs]
        for side, runs in sides.items()
    }
    had = min(map(len, [*trl, *mtrl]))
    return {
        "lesson": asdict(lesson),
        "rewards": sides,
        "steps": took,
        "median": {side: median(steps) for side, steps in took.items()},
        "ahead": [mean(mine[:had]) - mean(theirs[:had]) for theirs, mine in zip(trl, mtrl, strict=True)],
        "had": had,
    }


def main() -> None:
    lessons, results = map(Path, sys.argv[1:])
    learned = []
    for given in json.loads(lessons.read_text(encoding="utf-8")):
        lesson = Lesson(**given)
        torch.set_num_threads(lesson.sizes.threads)
        learned.append({"rewards": asyncio.run(Class(lesson).learn())})
    results.write_text(json.dumps(learned) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
