"""The warm start: imitate the environment's demonstrator until sampled episodes succeed often enough for RL.

RL amplifies what happens already, so a policy that never succeeds learns nothing, and one that always does has nothing
to learn. How many updates of imitation lie between the two depends on the seed, the task and the model. So the number
is not set: every `model.warm_start.check_every` updates the share of successes is measured, on training rows, sampled
as in training and judged by the scorer, and imitation ends when the share is inside `model.warm_start.success_band`.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import inspect
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from mtrl.config.schema import Config
from mtrl.environments.factory import Task
from mtrl.environments.family import reward_is_success
from mtrl.errors import UserError
from mtrl.evaluation.heldout import score_groups
from mtrl.generator.rollouts import Rollouts
from mtrl.models import sft, tiny
from mtrl.models.demonstrations import demonstrate, demonstrations
from mtrl.models.renderer import TinyRenderer, make_renderer
from mtrl.rewards.compose import RewardComposer
from mtrl.tracking.files import replace_text
from mtrl.trainer.loading import load_model
from mtrl.types import Group, Message

KEY_CONVERSATIONS = 256
"""The cache key covers this number of demonstrations, whose text changes with whatever the environment says."""
RECORD = "warm_start.json"

OnStep = Callable[[int, float | None], None]
"""Called after each update with the number of updates so far and the last measured share of successes."""
Measure = Callable[[Any, Any], float]
"""From a model and its tokenizer to the share of sampled episodes on training rows that succeed."""


@dataclass(frozen=True)
class Foothold:
    """What a warm start reached."""

    success: float
    """Share of sampled episodes on training rows that succeed."""
    episodes: int
    """How many were sampled."""
    steps: int
    """Updates of imitation that led there."""
    band: tuple[float, float]
    """Where the share had to be."""
    path: str | None = None
    """The model, where it was inside the band without any imitation; else null: the weights are beside this record."""

    def __str__(self) -> str:
        low, high = self.band
        return (
            f"{self.success:.1%} of {self.episodes} sampled episodes succeed after {self.steps} updates of imitation "
            f"(wanted: {low:.0%} to {high:.0%})"
        )

    @classmethod
    def read(cls, folder: Path) -> Foothold | None:
        """The record of a finished warm start in this folder; None where there is none."""
        try:
            found = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return cls(**found | {"band": tuple(found["band"])})


def warm_start(
    config: Config,
    task: Task,
    measure: Measure,
    on_step: OnStep = lambda step, success: None,
) -> tuple[str, Foothold]:
    """The folder or Hub name of the policy that RL starts from, made now unless it is in the cache.

    Raises:
        UserError: the task has no demonstrator, a demonstration fails, or the share of successes stays below the band.
    """
    if task.family.demonstrate is None:
        raise UserError(
            f"model.warm_start needs a demonstrator, and {task.family.name} has none: give it a `demonstrate`, or set "
            "model=hf model.path=FOLDER model.warm_start.enabled=false"
        )
    folder = cache_folder() / "warm_start" / f"{task.family.name}-{cache_key(config, task)}"
    found = Foothold.read(folder)
    if found is None:
        found = make(config, task, folder, measure, on_step)
    return found.path or str(folder), found


def make(config: Config, task: Task, folder: Path, measure: Measure, on_step: OnStep) -> Foothold:
    """Imitate, and write model, tokenizer and record to `folder`."""
    settings = config.model.warm_start
    rng = random.Random(config.seed)
    conversations = list(played(config, task, rng))
    if config.model.name == "tiny":
        sizes = config.model.tiny
        tokenizer = tiny.train_tokenizer(conversations, sizes.vocabulary, task.family.tokens)
        model, success = tiny.make_model(sizes, tokenizer, config.seed), None  # random weights: nothing to measure
    else:
        model, tokenizer = load_model(config, str(config.model.path))
        success = measure(model, tokenizer)
    band = (settings.success_band[0], settings.success_band[1])
    if success is not None and success >= band[0]:
        foothold = Foothold(success, settings.episodes, 0, band, path=str(config.model.path))
        folder.mkdir(parents=True, exist_ok=True)
    else:
        renderer = make_renderer(tokenizer, config.model.renderer)
        examples = [sft.to_example(renderer, messages) for messages in conversations]
        imitation = Imitation(config, model, sft.batches(examples, min(settings.batch_size, len(examples)), rng))
        success = imitate(config, imitation, lambda policy: measure(policy, tokenizer), on_step)
        foothold = Foothold(success, settings.episodes, imitation.steps, band)
        if (made := Foothold.read(folder)) is not None:  # another process was faster, and its readers may be at work
            return made
        tiny.save(imitation.policy, tokenizer, folder)
    replace_text(folder / RECORD, json.dumps(asdict(foothold)) + "\n")
    return foothold


class Imitation:
    """A model that is fine-tuned on demonstrations, and the moving average of its weights, which is the policy."""

    def __init__(self, config: Config, model: Any, next_batch: Callable[[], list[sft.Example]]):
        settings = config.model.warm_start
        self.model, self.next_batch = model, next_batch
        self.optimizer = sft.MixedOptimizer(model, settings.muon_lr, settings.lr)
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(settings.ema_decay))
        self.warmup = settings.warmup_steps
        self.max_tokens = config.trainer.max_tokens_per_microbatch
        self.steps = 0

    @property
    def policy(self) -> Any:
        return self.average.module.eval()

    def update(self) -> None:
        """One step of fine-tuning."""
        scale = min(1.0, (self.steps + 1) / max(self.warmup, 1))
        sft.update(self.model, self.next_batch(), self.optimizer, scale, self.max_tokens)
        self.average.update_parameters(self.model)
        self.steps += 1

    def state(self) -> tuple[Any, ...]:
        """A copy of all that an update changes."""
        return copy.deepcopy(
            (self.model.state_dict(), self.average.state_dict(), self.optimizer.state_dict(), self.steps)
        )

    def restore(self, state: tuple[Any, ...]) -> None:
        """Be as at the time of `state`."""
        model, average, optimizer, self.steps = state
        self.model.load_state_dict(model)
        self.average.load_state_dict(average)
        self.optimizer.load_state_dict(optimizer)


def imitate(config: Config, imitation: Imitation, measure: Callable[[Any], float], on_step: OnStep) -> float:
    """Update until the policy's share of successes is inside the band; where it has jumped over the band, go back to
    the last measurement and take smaller strides.

    Returns:
        The share: inside the band, or above it where a single update jumps over it.

    Raises:
        UserError: `max_steps` updates did not lead there.
    """
    settings = config.model.warm_start
    low, high = settings.success_band
    stride, done, shown = max(settings.min_steps, settings.check_every), 0, None
    while done < settings.max_steps:
        before = imitation.state()
        stride = min(stride, settings.max_steps - done)
        for _ in range(stride):
            imitation.update()
            done += 1
            on_step(done, shown)
        success = shown = measure(imitation.policy)
        if low <= success <= high or (success > high and stride == 1):
            return success
        if success < low:
            stride = min(stride, settings.check_every)
        elif done < settings.max_steps:
            imitation.restore(before)
            stride = max(1, stride // 2)
    place, fix = ("below", "a longer one") if success < low else ("above", "smaller strides, check_every,")
    raise UserError(
        f"the warm start ended after model.warm_start.max_steps={settings.max_steps} updates with {success:.1%} of "
        f"{settings.episodes} sampled episodes right, {place} model.warm_start.success_band={[low, high]}; take "
        f"{fix} or a demonstrator that succeeds more often (python -m mtrl.preflight says how often it does)"
    )


def success_of(config: Config, task: Task, connect: Callable[[Any, Any], Any], model: Any, tokenizer: Any) -> float:
    """The share of successes among `model.warm_start.episodes` episodes, sampled as in training, on rows spread over
    the training split.

    Args:
        connect: from a model and its tokenizer to the `Player` that plays it.
    """
    rows, count = task.splits.train, config.model.warm_start.episodes
    chosen = [rows[index * len(rows) // count] for index in range(count)]
    player = connect(copy.deepcopy(model), tokenizer)  # engines change a model's storage
    # A scorer of its own needs no rewards, whose components may ask a judge that costs money.
    composer = RewardComposer(config.reward) if task.family.score is reward_is_success else None

    async def play() -> list[Group]:
        report = await Rollouts(player.loop, config.seed, max_failed_share=1.0).collect(
            "warm_start", chosen, 1, player.sampling
        )
        for group in report.groups:
            if composer is not None:
                await composer.apply_async(group)
        await score_groups(task.family, report.groups, config.environment.episode_timeout)
        await player.loop.close()
        await player.engine.close()
        return report.groups

    scores = [t.score or 0.0 for group in asyncio.run(play()) for t in group.trajectories]
    return sum(score >= config.evaluation.success_threshold for score in scores) / count


def played(config: Config, task: Task, rng: random.Random) -> Iterator[list[Message]]:
    """The demonstrations, over and over the training rows."""
    count, timeout = config.model.warm_start.demonstrations, config.environment.step_timeout
    return demonstrations(task.family, task.make_environment, task.splits.train, rng, count, timeout)


def cache_key(config: Config, task: Task) -> str:
    """Names the result: the model, the seed, the rows, how turns are sampled, the code that is run and what it says at
    the beginning."""
    generator, count = config.generator, config.model.warm_start.demonstrations
    code = [task.family.demonstrate, task.family.score, demonstrate, TinyRenderer, sft.update, tiny.save, make]
    rows = hashlib.sha256(json.dumps(task.splits.train[:count], sort_keys=True, default=str).encode()).hexdigest()
    parts = [
        asdict(config.model),
        model_files(config.model.path),
        config.seed,
        task.family.name,
        dict(config.environment.config),
        asdict(config.reward),
        config.evaluation.success_threshold,
        [generator.max_turns, generator.max_context_length, generator.use_conversation_multi_turn],
        [asdict(generator.sampling_params), asdict(generator.agent)],
        [_source(function) for function in code],
        rows,
        len(task.splits.train),
        list(islice(played(config, task, random.Random(config.seed)), KEY_CONVERSATIONS)),
        torch.__version__,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def model_files(path: str | None) -> list[list[Any]]:
    """Names, sizes and times of the files of a model folder; a Hub name has none here."""
    folder = Path(path or "")
    if path is None or not folder.is_dir():
        return []
    files = sorted(each for each in folder.iterdir() if each.is_file())
    return [[each.name, each.stat().st_size, each.stat().st_mtime_ns] for each in files]


def _source(function: Any) -> str:
    """The module that defines it, or nothing where there is no file (a notebook)."""
    try:
        return inspect.getsource(inspect.getmodule(function))
    except (OSError, TypeError):
        return ""


def cache_folder() -> Path:
    return Path(os.environ.get("MTRL_CACHE", Path.home() / ".cache" / "mtrl"))
