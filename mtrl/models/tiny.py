"""The built-in tiny policy: under a million parameters, its own tokenizer and chat template, built on this machine.

Its weights are random at first; `mtrl/trainer/setup/warm_start.py` trains it on demonstrations of a task.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from mtrl.config.model_schema import TinyConfig
from mtrl.models.renderer import END, TINY_TEMPLATE
from mtrl.models.vision import processor_of
from mtrl.types import ROLES, Message

LONGEST_RUN = 500
"""Maximum number of letters, or of spaces, that the training of a tokenizer counts as one word; its time rises with the
square of the length of a word."""
LONG_RUN = re.compile(rf"[A-Za-z]{{{LONGEST_RUN}}}(?=[A-Za-z])|\s{{{LONGEST_RUN}}}(?=\s)")


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a Hugging Face folder completely or not at all; an existing folder is replaced."""
    disable_progress_bar()
    partial, old = (folder.with_name(f"{folder.name}.{os.getpid()}.{state}") for state in ("partial", "old"))
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    # Tensors are cloned, because the local engine lets several parameters share one storage. Tied weights stay tied.
    clones: dict[Any, Any] = {}
    for value in model.state_dict().values():
        if (place := _place(value)) not in clones:
            clones[place] = value.detach().clone()
    model.save_pretrained(
        partial, state_dict={name: clones[_place(value)] for name, value in model.state_dict().items()}
    )
    tokenizer.save_pretrained(partial)
    if (images := processor_of(tokenizer)) is not None:
        images.save(partial)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def make_model(sizes: TinyConfig, tokenizer: Any, seed: int) -> Any:
    """Return a model of the Qwen3 architecture with random weights."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        head_dim=sizes.hidden_size // sizes.heads,
        max_position_embeddings=sizes.context,
        initializer_range=sizes.init_std,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def train_tokenizer(
    conversations: Iterable[list[Message]],
    vocabulary: int,
    tags: tuple[str, ...] = (),
    template: str = TINY_TEMPLATE,
    special_tokens: tuple[str, ...] = (),
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on the conversations' text. Each digit is a token, role markers and
    `special_tokens` are special tokens, and each of `tags` is one token."""
    tokenizer = Tokenizer(models.BPE())
    words = r"\d| ?[A-Za-z]+| ?[^\sA-Za-z\d]|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [END, "<|pad|>", *(f"<|{role}|>" for role in ROLES), *special_tokens]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(tags),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_in_pieces(texts_of(conversations)), trainer)
    tokenizer.add_tokens(list(tags))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token="<|pad|>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def _in_pieces(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts, cut within each run of more than `LONGEST_RUN` letters or spaces."""
    for text in texts:
        start = 0
        for run in LONG_RUN.finditer(text):
            yield text[start : run.end()]
            start = run.end()
        yield text[start:]


def texts_of(conversations: Iterable[list[Message]]) -> Iterator[str]:
    """Yield the texts of all messages, without images."""
    for message in (message for messages in conversations for message in messages):
        content = message["content"]
        yield from [content] if isinstance(content, str) else (part.get("text", "") for part in content)
