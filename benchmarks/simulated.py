"""Stand-ins for benchmarks of the work around a model: text, a tokenizer, an engine, and an environment with a tool.

The text is Python's own standard library, so that nothing is downloaded. The tokenizer is a byte-level BPE with Qwen's
pattern of words and special tokens, and the renderer is Qwen3's, as in a run with such a model. `--tokenizer` uses a
real tokenizer.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mtrl.engines.base import EngineStats, SamplingParams
from mtrl.environments.tools import ToolEnvironment, tool
from mtrl.models.renderer import make_renderer
from mtrl.rollout.conversation import Codec
from mtrl.types import FinishReason, Generation, Row

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pattern by which Qwen's tokenizer divides text into words."""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def library(characters: int) -> str:
    """Return the first `characters` characters of Python's standard library."""
    text, files = "", sorted(Path(os.__file__).parent.glob("*.py"))
    for file in files:
        text += file.read_text(encoding="utf-8", errors="replace")
        if len(text) >= characters:
            break
    return text[:characters]


def train_tokenizer(text: str, vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE like Qwen's on this text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(MARKERS),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    tokenizer.add_tokens(list(MARKERS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )


def make_codec(text: str, vocabulary: int, folder: str | None) -> Codec:
    """Return Qwen3's renderer with the tokenizer of a folder, or with one that is trained on `text`."""
    tokenizer = AutoTokenizer.from_pretrained(folder) if folder else train_tokenizer(text, vocabulary)
    with suppress(ImportError):  # a run uses it; an older checkout may lack it
        from mtrl.models.plain_tokenizer import plain

        tokenizer = plain(tokenizer)
    return Codec(tokenizer, make_renderer(tokenizer, "qwen3"))


class Pages(ToolEnvironment):
    """Has a tool that reads pages of the text, of `characters` characters. The reward of an answer is a hash of it."""

    def __init__(self, max_turns: int, text: str, characters: int):
        super().__init__(max_turns)
        self.text, self.characters = text, characters

    @tool
    def read(self, page: int) -> str:
        """Read a page of the manual."""
        start = page * self.characters % max(1, len(self.text) - self.characters)
        return self.text[start : start + self.characters]

    def answer(self, response: str, ground_truth: dict[str, Any]) -> tuple[float, None, bool]:
        return float(sum(response.encode()) % 2), None, True


class CannedEngine:
    """Engine (`mtrl.engines.base.Engine`) that returns immediately: tokens of the text and a tool call or, in the last
    turn, an answer. Every turn has the same number of tokens, and log-probs like those of a real engine."""

    def __init__(self, codec: Codec, text: str, turns: int, tokens: int, seed: int):
        self.version, self.stats = 0, EngineStats()
        self.ids = np.array(codec.encode(text), dtype=np.int64)
        self.turns, self.tokens = turns, tokens
        self.stop = codec.stop_token_ids[0]
        self.calls = [codec.encode(call(page)) for page in range(100)]
        rng = np.random.default_rng(seed)
        self.logprobs = np.log(rng.uniform(0.05, 1.0, 100_003)).astype(np.float32)
        self.seed = seed
        self._turns: Counter[str] = Counter()

    def open(self, trajectory_id: str) -> None:
        self._turns[trajectory_id] = 0

    async def generate(self, trajectory_id: str, prompt: Any, sampling: SamplingParams) -> Generation:
        return self.sample(trajectory_id, prompt)

    def sample(self, trajectory_id: str, prompt: Any) -> Generation:
        """Return the next turn of a trajectory."""
        self._turns[trajectory_id] += 1
        turn = self._turns[trajectory_id]
        rng = random.Random(f"{self.seed}/{trajectory_id}/{turn}")
        end = [self.stop] if turn == self.turns else [*rng.choice(self.calls), self.stop]
        words = _cut(self.ids, self.tokens - len(end), rng)
        self.stats.prompt_tokens += len(prompt)
        self.stats.sampled_tokens += self.tokens
        spans = [(self.version, self.tokens)]
        return Generation([*words, *end], _cut(self.logprobs, self.tokens, rng), FinishReason.STOP, spans)

    def release(self, trajectory_id: str) -> None:
        self._turns.pop(trajectory_id, None)

    async def load_weights(self, weights: Any, version: int) -> None:
        self.version = version

    async def close(self) -> None:
        """Do nothing: the engine has no process."""


def _cut(values: np.ndarray, count: int, rng: random.Random) -> list[Any]:
    start = rng.randrange(len(values) - count)
    return values[start : start + count].tolist()


def call(page: int) -> str:
    """Return a tool call as Qwen's models write it."""
    return f"\n<tool_call>\n{json.dumps({'name': 'read', 'arguments': {'page': page}})}\n</tool_call>"


def make_rows(codec: Codec, text: str, count: int, tokens: int) -> list[Row]:
    """Return tasks with prompts of about `tokens` tokens, without special tokens and tools."""
    ids = codec.encode(text[: 8 * tokens * (count + 1)])
    parts = [codec.tokenizer.decode(ids[i * tokens : (i + 1) * tokens]) for i in range(count)]
    return [
        {"id": str(i), "prompt": [{"role": "user", "content": part}], "ground_truth": {"answer": str(i)}}
        for i, part in enumerate(parts)
    ]
