"""Number of steps in which mtrl learns a task, for a comparison with TRL. The reward is the share of the sampled tokens
that are in one half of the vocabulary's words. A lesson ends when the mean reward of a step is 0.95.

Both sides start from the same random weights and prompts, with GRPO's advantages, the clipped loss as a mean over
tokens, no KL, AdamW and one update per step. `trl.py --learning` compares them; this script runs mtrl's side:

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
    """Training from random weights until the mean reward is high enough; both sides run the same lessons."""

    words: list[str]
    """Options of `step.py`: the sizes, the seed, and options that only mtrl has."""
    lr: float
    """Learning rate."""
    enough: float
    """Mean reward that ends the lesson."""
    most: int
    """Number of steps after which the lesson is given up."""

    @property
    def sizes(self) -> Sizes:
        sizes, _ = parse_sizes(self.words)
        return sizes

    @property
    def taught(self) -> list[str]:
        return words_of(self.sizes)[::2]

    def job(self, folder: Path) -> dict[str, Any]:
        """Return the job of the same lesson for TRL."""
        sizes = self.sizes
        way = Way("float32", sizes.prompts * sizes.group_size)
        return make_job(sizes, way, self.most, folder, lr=self.lr, taught=self.taught, enough=self.enough)


class RewardedWords(Hashed):
    """Environment whose reward is the share of rewarded words."""

    def __init__(self, max_turns: int, observation: str, taught: list[str], tokens: int):
        super().__init__(max_turns, observation, seed=0)
        self.taught, self.tokens = taught, tokens

    def step(self, response: str, ground_truth: dict[str, Any]) -> tuple[float, str, bool]:
        _, observation, done = super().step(response, ground_truth)
        return share(self.taught, response, self.tokens), observation, done


class LessonBench(Bench):
    """Runs steps of `step.py` until the lesson ends."""

    def __init__(self, lesson: Lesson):
        sizes = replace(lesson.sizes, steps=lesson.most)
        super().__init__(sizes)
        self.lesson = lesson
        self.rewards: list[float] = []
        self.config.trainer.optimizer.lr = lesson.lr
        observation = text_of(sizes, sizes.tool_tokens - TOOL_FRAME, 0)
        tokens = sizes.turns * sizes.tokens
        self.rollouts.loop.make_environment = partial(RewardedWords, sizes.turns, observation, lesson.taught, tokens)

    async def learn(self) -> list[float]:
        """Run the lesson, and return the mean reward of each step."""
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
    """Return the number of updates before the first step whose mean reward is `enough` or more, None without one."""
    return next((step for step, reward in enumerate(rewards) if reward >= enough), None)


def compare(trl: list[list[float]], mtrl: list[list[float]], lesson: Lesson) -> dict[str, Any]:
    """Return the mean rewards and the numbers of steps of all seeds, by side. A lesson that was given up counts as
    `most` + 1 steps.

    `ahead` is mtrl's reward minus TRL's for each seed, as the mean over the steps that all runs have. It distinguishes
    two similar sides better than the numbers of steps, which are small integers.
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
        learned.append({"rewards": asyncio.run(LessonBench(lesson).learn())})
    results.write_text(json.dumps(learned) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
