"""The built-in tiny policy: under a million parameters, its own tokenizer and chat template, made on this machine.

Warm-started by a short SFT on a weak demonstrator's episodes, so that RL has a foothold and something left to teach.
Made once per recipe and kept in the cache folder (`MTRL_CACHE`, default `~/.cache/mtrl`).
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from mtrl.environments.base import BaseEnvironment
from mtrl.environments.family import Family
from mtrl.models.demonstrations import demonstrate, demonstrations
from mtrl.models.renderer import END, ROLES, TINY_TEMPLATE, TinyRenderer
from mtrl.models.sft import MixedOptimizer, batches, fine_tune, to_example
from mtrl.types import Message, Row

KEY_CONVERSATIONS = 256
"""So many demonstrations are part of the cache key: they change with whatever the environment says."""


@dataclass(frozen=True)
class TinyRecipe:
    """Sizes and warm start; the keys of `model.tiny`."""

    hidden_size: int = 128
    intermediate_size: int = 384
    layers: int = 3
    heads: int = 2
    vocabulary: int = 512
    context: int = 1024
    init_std: float = 0.1
    demonstrations: int = 4096
    sft_steps: int = 300
    sft_batch: int = 32
    muon_lr: float = 0.02
    adam_lr: float = 2e-3


@dataclass
class WarmStart:
    """What the tiny policy is made from."""

    family: Family
    make_environment: Callable[[], BaseEnvironment]
    rows: list[Row]
    """Training rows only: held-out rows never occur in demonstrations."""
    seed: int
    recipe: TinyRecipe = field(default_factory=TinyRecipe)
    settings: dict[str, Any] = field(default_factory=dict)
    """The family's configuration, part of the cache key."""
    timeout: float = 30.0
    """Seconds that one demonstration may take."""

    def key(self) -> str:
        """Names the result: the recipe, the seed, the rows, the code that is run and what it says at the beginning."""
        code = [_source(f) for f in (self.family.demonstrate, demonstrate, TinyRenderer, fine_tune, build)]
        rows = hashlib.sha256(
            json.dumps(self.rows[: self.recipe.demonstrations], sort_keys=True, default=str).encode()
        ).hexdigest()
        spoken = list(islice(self.conversations(random.Random(self.seed)), KEY_CONVERSATIONS))
        parts = [asdict(self.recipe), self.seed, self.family.name, self.settings, code, rows, spoken, torch.__version__]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def conversations(self, rng: random.Random) -> Iterator[list[Message]]:
        """The demonstrations, over and over the rows."""
        return demonstrations(
            self.family, self.make_environment, self.rows, rng, self.recipe.demonstrations, self.timeout
        )


def _source(function: Any) -> str:
    """The module that defines it, or nothing where there is no file (a notebook)."""
    try:
        return inspect.getsource(inspect.getmodule(function))
    except (OSError, TypeError):
        return ""


def cache_folder() -> Path:
    return Path(os.environ.get("MTRL_CACHE", Path.home() / ".cache" / "mtrl"))


def tiny_policy(start: WarmStart, on_step: Callable[[int, float], None] = lambda step, loss: None) -> Path:
    """The folder of the warm-started policy, made now unless it is cached."""
    folder = cache_folder() / "tiny" / f"{start.family.name}-{start.key()}"
    if not (folder / "config.json").exists():
        model, tokenizer = build(start, on_step)
        if not (folder / "config.json").exists():  # another process may have been faster, and its readers be at work
            save(model, tokenizer, folder)
    return folder


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a Hugging Face folder, whole or not at all; one that is there is replaced."""
    disable_progress_bar()
    partial, old = (folder.with_name(f"{folder.name}.{os.getpid()}.{state}") for state in ("partial", "old"))
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    # Cloned because the local engine lets several parameters share one storage.
    model.save_pretrained(
        partial, state_dict={name: value.detach().clone() for name, value in model.state_dict().items()}
    )
    tokenizer.save_pretrained(partial)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def build(start: WarmStart, on_step: Callable[[int, float], None]) -> tuple[Any, Any]:
    """Demonstrate, train the tokenizer, then the model."""
    recipe = start.recipe
    rng = random.Random(start.seed)
    conversations = list(start.conversations(rng))
    tokenizer = train_tokenizer(conversations, recipe.vocabulary, start.family.tokens)
    renderer = TinyRenderer(tokenizer)
    examples = [to_example(renderer, messages) for messages in conversations]
    model = make_model(recipe, tokenizer, start.seed)
    optimizer = MixedOptimizer(model, recipe.muon_lr, recipe.adam_lr)
    fine_tune(model, batches(examples, recipe.sft_batch, rng), recipe.sft_steps, optimizer, on_step=on_step)
    return model, tokenizer


def make_model(recipe: TinyRecipe, tokenizer: Any, seed: int) -> Any:
    """A Qwen3 with random weights."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        head_dim=recipe.hidden_size // recipe.heads,
        max_position_embeddings=recipe.context,
        initializer_range=recipe.init_std,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def train_tokenizer(
    conversations: Iterable[list[Message]], vocabulary: int, tags: tuple[str, ...] = ()
) -> PreTrainedTokenizerFast:
    """Byte-level BPE on the conversations' text: digits stay single, role markers are special, `tags` are whole."""
    tokenizer = Tokenizer(models.BPE())
    words = r"\d| ?[A-Za-z]+| ?[^\sA-Za-z\d]|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [END, "<|pad|>", *(f"<|{role}|>" for role in ROLES)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(tags),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((m["content"] for messages in conversations for m in messages), trainer)
    tokenizer.add_tokens(list(tags))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token="<|pad|>",
        chat_template=TINY_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
