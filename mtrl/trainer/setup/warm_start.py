"""The warm start: imitation of the environment's demonstrator until sampled episodes succeed often enough for RL.

RL amplifies behaviour that already occurs, so a policy that never succeeds learns nothing, and a policy that always
succeeds has nothing to learn. The number of updates between these two points depends on the seed, the task and the
model, so it is not fixed: every `model.warm_start.check_every` updates the success rate is measured, on training rows,
sampled as in training and judged by the scorer. Imitation ends when it is inside `model.warm_start.success_band`.
Where an answer can be guessed, successes of fewer turns than a solution needs must not count
(`model.warm_start.min_turns`): from a policy that succeeds by guesses alone, RL learns to guess.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import inspect
import json
import logging
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from mtrl.config.derived import max_logits
from mtrl.config.mixture import source_configs, source_of
from mtrl.config.schema import Config
from mtrl.environments.factory import Task
from mtrl.environments.family import reward_is_success
from mtrl.environments.mixture import interleaved
from mtrl.errors import UserError, disk_error
from mtrl.models import sft, tiny, tiny_vision
from mtrl.models.gguf import as_folder
from mtrl.models.renderer import TinyRenderer, make_renderer
from mtrl.models.vision import processor_of
from mtrl.record.checksums import SUMS, changes, write_checksums
from mtrl.rewards.mixture import make_composer
from mtrl.rollout.control_tokens import ControlTokens
from mtrl.rollout.demonstrations import demonstrate, demonstrations
from mtrl.rollout.rollouts import Rollouts
from mtrl.scoring.heldout import score_groups
from mtrl.trainer.loading import compute_dtype, fit_attention, load_model
from mtrl.types import Demonstration, Group, Message, Row
from mtrl.utils.files import cache_folder, locked, replace_text

KEY_CONVERSATIONS = 256
"""Number of demonstrations in the cache key; their text changes with the environment's text."""
RECORD = "warm_start.json"

log = logging.getLogger(__name__)

OnStep = Callable[[int, float | None], None]
"""Function that is called after each update with the number of updates so far and the last measured success rate."""
Measure = Callable[[Any, Any], float]
"""Function from a model and its tokenizer to the share of sampled episodes on training rows that succeed."""


@dataclass(frozen=True)
class WarmStartResult:
    """Result of a warm start: success rate, number of updates, and folder of the policy."""

    success: float
    """Share of sampled episodes on training rows that succeed."""
    episodes: int
    """Number of sampled episodes."""
    steps: int
    """Number of updates of imitation."""
    band: tuple[float, float]
    """Lower and upper limit of the required success rate."""
    path: str | None = None
    """Folder or Hub name of the model if it needed no imitation; None if the weights are in the folder of this
    record."""
    min_turns: int = 1
    """Minimum number of turns of an episode that counts as a success."""

    def __str__(self) -> str:
        low, high = self.band
        turns = f" in {self.min_turns} turns or more" if self.min_turns > 1 else ""
        return (
            f"{self.success:.1%} of {self.episodes} sampled episodes succeed{turns} after {self.steps} updates of "
            f"imitation (wanted: {low:.0%} to {high:.0%})"
        )

    @classmethod
    def read(cls, folder: Path) -> WarmStartResult | None:
        """Read the record of a finished warm start in this folder; None without a record, or if a file is damaged,
        which is logged."""
        if not (folder / SUMS).exists():
            return None
        if wrong := changes(folder):
            log.warning("%s is damaged (%s): the warm start is made again", folder, wrong)
            return None
        found = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return cls(**found | {"band": tuple(found["band"])})


def warm_start(
    config: Config,
    task: Task,
    measure: Measure,
    on_step: OnStep = lambda step, success: None,
) -> tuple[str, WarmStartResult]:
    """Return the folder or Hub name of the policy after the warm start, which is made now unless it is in the cache,
    and the result of the warm start.

    Raises:
        UserError: the task has no demonstrator, a demonstration fails, no episode can have enough turns, or the success
            rate does not reach the band.
    """
    least, sources = config.model.warm_start.min_turns, source_configs(config).values()
    most = max((own.generator.max_turns for own in sources), default=config.generator.max_turns)
    if least > most:
        raise UserError(
            f"model.warm_start.min_turns={least} counts no episode as a success, since generator.max_turns={most}; "
            f"lower it to at most {most}"
        )
    if task.family.demonstrate is None:
        raise UserError(
            f"model.warm_start needs a demonstrator, and {task.family.name} has none: give it a `demonstrate`, or set "
            "model=hf model.path=FOLDER model.warm_start.enabled=false"
        )
    folder = cache_folder() / "warm_start" / f"{task.family.name}-{cache_key(config, task)}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f"{folder.name}.lock")):  # runs that start together make it once
        result = WarmStartResult.read(folder)
        if result is None:
            result = make(config, task, folder, measure, on_step)
    return result.path or str(folder), result


def make(config: Config, task: Task, folder: Path, measure: Measure, on_step: OnStep) -> WarmStartResult:
    """Make the warm start, and write model, tokenizer and record to `folder`. Return the record."""
    settings = config.model.warm_start
    rng = random.Random(config.seed)
    chats = list(training_demonstrations(config, task, rng))
    if config.model.name == "tiny":
        model, tokenizer = random_policy(config, [chat.messages for chat in chats], task.family.tokens)
        success = None  # random weights, so not measured
    else:
        model, tokenizer = load_model(config, str(config.model.path))
        fit_attention(model, config)
        success = measure(model, tokenizer)
    band, turns = (settings.success_band[0], settings.success_band[1]), settings.min_turns
    if success is not None and success >= band[0]:
        result = WarmStartResult(success, settings.episodes, 0, band, str(config.model.path), turns)
        folder.mkdir(parents=True, exist_ok=True)
    else:
        renderer = make_renderer(tokenizer, config.model.renderer)
        examples = to_examples(tokenizer, renderer, chats)
        imitation = Imitation(config, model, sft.batches(examples, min(settings.batch_size, len(examples)), rng))
        success = imitate(config, imitation, lambda policy: measure(policy, tokenizer), on_step)
        result = WarmStartResult(success, settings.episodes, imitation.steps, band, min_turns=turns)
        with _writing():
            tiny.save(imitation.policy, tokenizer, folder)
    with _writing():
        replace_text(folder / RECORD, json.dumps(asdict(result)) + "\n")
        write_checksums(folder, [file for file in folder.iterdir() if file.is_file() and file.name != SUMS])
    return result


def random_policy(config: Config, conversations: Sequence[list[Message]], tags: tuple[str, ...]) -> tuple[Any, Any]:
    """Return a tiny policy with random weights, and its tokenizer, trained on these conversations."""
    sizes = config.model.tiny
    train_tokenizer = tiny_vision.train_vision_tokenizer if sizes.vision_layers else tiny.train_tokenizer
    tokenizer = train_tokenizer(conversations, sizes.vocabulary, tags)
    return tiny_vision.make_policy(sizes, tokenizer, config.seed), tokenizer


def to_examples(tokenizer: Any, renderer: Any, chats: Sequence[Demonstration]) -> list[sft.Example]:
    """Return conversations as examples of fine-tuning. The text that the model does not write is encoded as in the
    prompts of RL, in which control tokens of a message or of a tool's schema have a space."""
    control = ControlTokens(tokenizer)
    chats = [_escaped(chat, control) for chat in chats]
    if (images := processor_of(tokenizer)) is not None:
        return [sft.to_image_example(renderer, images, chat) for chat in chats]
    return [sft.to_example(renderer, chat) for chat in chats]


def _escaped(chat: Demonstration, control: ControlTokens) -> Demonstration:
    messages = [
        message if message["role"] == "assistant" else control.escape_messages([message])[0]
        for message in chat.messages
    ]
    return Demonstration(messages, control.escape_tools(chat.tools) or [])


State = tuple[int, list[IO[bytes]]]
"""Number of updates, and the files of model, average and optimiser."""


class Imitation:
    """A model that is fine-tuned on demonstrations, with the moving average of its weights, which is the policy."""

    def __init__(self, config: Config, model: Any, next_batch: Callable[[], list[sft.Example]]):
        settings = config.model.warm_start
        self.model, self.next_batch = model, next_batch
        self.optimizer = sft.MixedOptimizer(model, settings.muon_lr, settings.lr)
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(settings.ema_decay))
        self.warmup = settings.warmup_steps
        self.max_tokens = config.trainer.max_tokens_per_microbatch
        self.max_logits = max_logits(config, model.device.type)
        self.dtype = compute_dtype(config)
        self.steps = 0

    @property
    def policy(self) -> Any:
        return self.average.module.eval()

    def update(self) -> None:
        """Make one update of fine-tuning."""
        scale = min(1.0, (self.steps + 1) / max(self.warmup, 1))
        with torch.autocast(self.model.device.type, self.dtype, enabled=self.dtype != self.model.dtype):
            sft.update(self.model, self.next_batch(), self.optimizer, scale, self.max_tokens, self.max_logits)
        self.average.update_parameters(self.model)
        self.steps += 1

    def save(self) -> State:
        """Write everything that an update changes to files, since a copy in memory would take four times the memory of
        the weights."""
        return self.steps, [_stored(part.state_dict()) for part in (self.model, self.average, self.optimizer)]

    def restore(self, state: State) -> None:
        """Restore the state that `save` returned."""
        self.steps, files = state
        for part, file in zip((self.model, self.average, self.optimizer), files, strict=True):
            file.seek(0)
            part.load_state_dict(torch.load(file, weights_only=True))


def _stored(state: Any) -> IO[bytes]:
    """Return a file without a name, in the folder of the cache, that holds this state."""
    with _writing():
        cache_folder().mkdir(parents=True, exist_ok=True)
        file = TemporaryFile(dir=cache_folder())  # noqa: SIM115
        torch.save(state, file)
    return file


@contextmanager
def _writing() -> Iterator[None]:
    """Context that converts errors of the cache's disk to a `UserError` that names the cache.

    Raises:
        UserError: the disk is full, over a quota or read-only.
    """
    try:
        yield
    except Exception as error:
        if number := disk_error(error):
            raise UserError(
                f"the cache {cache_folder()} cannot hold the files of the warm start ({os.strerror(number)}), which "
                "take up to four times the memory of the weights while it is made; free some space, or name another "
                "folder: MTRL_CACHE=FOLDER"
            ) from error
        raise


def imitate(config: Config, imitation: Imitation, measure: Callable[[Any], float], on_step: OnStep) -> float:
    """Update until the policy's success rate is inside the band. If it has jumped over the band, return to the state of
    the last measurement and halve the number of updates between measurements.

    Returns:
        The success rate: inside the band, or above it if a single update jumps over the band.

    Raises:
        UserError: the success rate was not in the band after `max_steps` updates.
    """
    settings = config.model.warm_start
    low, high = settings.success_band
    stride, done, shown = max(settings.min_steps, settings.check_every), 0, None
    before: State | None = None
    while done < settings.max_steps:
        before = None  # frees its files before the next ones are written
        before = imitation.save()
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
    side, fix = ("below", "raise max_steps") if success < low else ("above", "lower check_every")
    raise UserError(
        f"after model.warm_start.max_steps={settings.max_steps} updates {success:.1%} of {settings.episodes} sampled "
        f"episodes succeed, {side} model.warm_start.success_band={[low, high]}; {fix}, or give a demonstrator that "
        "succeeds more often (mtrl preflight reports its success rate)"
    )


def success_of(config: Config, task: Task, connect: Callable[[Any, Any], Any], model: Any, tokenizer: Any) -> float:
    """Return the success rate of `model.warm_start.episodes` episodes, sampled as in training, on rows spread over the
    training split. Successes in fewer than `model.warm_start.min_turns` turns do not count.

    Args:
        connect: function from a model and its tokenizer to the `ConnectedModel` that runs its episodes.
    """
    count, least = config.model.warm_start.episodes, config.model.warm_start.min_turns
    chosen = measured_rows(task, count)
    player = connect(copy.deepcopy(model), tokenizer)  # engines change a model's storage
    # Rewards are computed only if success is defined by them, since a component may be a judge that costs money.
    families = [source.family for source in task.sources.values()] or [task.family]
    composer = make_composer(config) if any(family.score is reward_is_success for family in families) else None

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

    trajectories = [trajectory for group in asyncio.run(play()) for trajectory in group.trajectories]
    scores = [t.score or 0.0 for t in trajectories if len(t.environment_turns) >= least]
    return sum(score >= config.evaluation.success_threshold for score in scores) / count


def measured_rows(task: Task, count: int) -> list[Row]:
    """Return `count` rows that are spread over the training rows; in a mixture, equally many of each source."""
    rows = task.splits.train
    names = dict.fromkeys(source_of(str(row["id"])) for row in rows) if task.sources else {}
    parts = [[row for row in rows if source_of(str(row["id"])) == name] for name in names] or [rows]
    each = -(-count // len(parts))
    return interleaved([[own[index * len(own) // each] for index in range(each)] for own in parts])[:count]


def training_demonstrations(config: Config, task: Task, rng: random.Random) -> Iterator[Demonstration]:
    """Yield the demonstrations, cycling over the training rows."""
    count, timeout = config.model.warm_start.demonstrations, config.environment.step_timeout
    return demonstrations(task.family, task.make_for_demonstrations, task.splits.train, rng, count, timeout)


def cache_key(config: Config, task: Task) -> str:
    """Return a hash of everything that determines the result: the model, the seed, the rows, the sampling, the code
    that runs, and the first demonstrations."""
    generator, count = config.generator, config.model.warm_start.demonstrations
    families = [source.family for source in task.sources.values()] or [task.family]
    functions = chain.from_iterable((family.demonstrate, family.score) for family in families)
    code = [*functions, demonstrate, TinyRenderer, sft.update, tiny.save, make]
    used = [*task.splits.train[:count], *measured_rows(task, config.model.warm_start.episodes)]
    rows = hashlib.sha256(json.dumps(used, sort_keys=True, default=str).encode()).hexdigest()
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
        list(map(asdict, islice(training_demonstrations(config, task, random.Random(config.seed)), KEY_CONVERSATIONS))),
        torch.__version__,
        *([str(dtype)] if (dtype := compute_dtype(config)) != getattr(torch, config.model.dtype) else []),
        *([played(config.environments)] if config.environments else []),
        *([asdict(generator.context)] if generator.context.fold != "none" else []),
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def played(environments: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the sources of a mixture without the keys that only training reads: their weights and group sizes."""
    training = ("weight", "algorithm")
    return {
        name: {key: value for key, value in source.items() if key not in training}
        for name, source in environments.items()
    }


def model_files(path: str | None) -> list[list[Any]]:
    """Return names, sizes and modification times of the files of a model folder, or of the converted folder of a GGUF
    file; empty for a Hub name."""
    folder = Path(as_folder(path or "", "model.path"))
    if path is None or not folder.is_dir():
        return []
    files = sorted(each for each in folder.iterdir() if each.is_file())
    return [[each.name, each.stat().st_size, each.stat().st_mtime_ns] for each in files]


def _source(function: Any) -> str:
    """Return the source of the module that defines the function; empty if there is no file, as in a notebook."""
    try:
        return inspect.getsource(inspect.getmodule(function))
    except (OSError, TypeError):
        return ""
