"""The rows that decode together, one token at a time, and the detection of their stop strings."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtrl.engines.local.sampling import SamplingRows, Uniforms, sample
from mtrl.engines.local.session import EngineSession
from mtrl.types import FinishReason


class DecodeBatch:
    """Row i is `sessions[i]` in slot i (or, before its first token, in the slots being prefilled).

    The state of the rows is in arrays, which are built again whenever the rows change.
    """

    def __init__(
        self, sessions: list[EngineSession], stops: StopStrings, device: torch.device, max_context_length: int
    ):
        params = [s.request.sampling for s in sessions]
        self.sessions, self.stops, self.device = sessions, stops, device
        self.ended: dict[int, FinishReason] = {}
        """Finish reason of each turn that ended, by row."""
        lengths = [len(s.ids) for s in sessions]
        self.lengths = torch.tensor(lengths, device=device)
        """Number of tokens in the cache, per row [n]."""
        self.ones = torch.ones_like(self.lengths)
        self.width = max(lengths) + 1
        """Number of tokens that the longest row holds after the next one is fed."""
        self.last = torch.tensor(
            [s.request.token_ids[-1] if s.request.token_ids else 0 for s in sessions], device=device
        )
        totals = np.array([len(s.request.prompt_ids) + len(s.request.token_ids) for s in sessions])
        sampled = np.array([len(s.request.token_ids) for s in sessions])
        room = np.array([p.max_generate_length for p in params]) - sampled
        self._room = np.minimum(room, max_context_length - totals)
        self._rows = SamplingRows.of(params, device)
        self._uniforms = Uniforms(np.array([p.seed for p in params], dtype=np.uint64), totals, device)
        self._stop_ids = _padded([p.stop_token_ids for p in params])
        self._stop_texts = {i: p.stop for i, p in enumerate(params) if p.stop}
        self._ids: list[np.ndarray] = []
        self._logprobs: list[Tensor] = []

    def take(self, logits: Tensor) -> None:
        """Sample one token per row from logits [n, V], and record the turns that end with it in `ended`. The ids are
        the only numbers for which the device is waited for; log-probs stay there until `flush`."""
        self.last, logprobs = sample(logits, self._rows, self._uniforms.next())
        ids = self.last.cpu().numpy()
        self._ids.append(ids)
        self._logprobs.append(logprobs)
        self._room -= 1
        stopped = (ids[:, None] == self._stop_ids).any(-1)
        for row in np.flatnonzero(stopped | (self._room <= 0)):
            self.ended[int(row)] = FinishReason.STOP if stopped[row] else FinishReason.LENGTH
        for row, texts in self._stop_texts.items():
            if self._completes_stop(row, texts):
                self.ended[row] = FinishReason.STOP

    def advance(self) -> None:
        """Count the tokens that were just fed: the length of every row grows by one."""
        self.lengths += 1
        self.width += 1

    def flush(self, version: int) -> None:
        """Append the sampled tokens to their requests, as tokens of policy `version`."""
        if not self._ids:
            return
        ids, logprobs = np.stack(self._ids, 1).tolist(), torch.stack(self._logprobs, 1).tolist()
        self._ids, self._logprobs = [], []
        for session, row_ids, row_logprobs in zip(self.sessions, ids, logprobs, strict=True):
            request = session.request
            if request is None:
                continue  # released while it decoded
            request.token_ids += row_ids
            request.logprobs += row_logprobs
            request.add_span(version, len(row_ids))
            session.ids = request.prompt_ids + request.token_ids[:-1]

    def _completes_stop(self, row: int, texts: tuple[str, ...]) -> bool:
        """Whether the newest tokens of a row complete one of the stop strings."""
        request = self.sessions[row].request
        if request is None or not self.stops.may_complete(int(self._ids[-1][row]), texts):
            return False
        length = span(texts)
        tail = [*request.token_ids[-length:], *(int(ids[row]) for ids in self._ids[-length:])][-length:]
        return self.stops.complete(tail, texts)


def _padded(lists: list[tuple[int, ...]]) -> np.ndarray:
    out = np.full((len(lists), max(1, *map(len, lists)) if lists else 1), -1)
    for row, values in zip(out, lists, strict=True):
        row[: len(values)] = values
    return out


class StopStrings:
    """Detects stop strings. The test runs after every token of every row; the text of the newest token alone mostly
    decides it, and that result is cached."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.may_complete = lru_cache(maxsize=None)(self._may_complete)

    def _may_complete(self, token_id: int, texts: tuple[str, ...]) -> bool:
        """Whether a token can be the last token of one of `texts`: its text contains the last character of the stop
        string, or cannot be determined from the token alone."""
        word = self._decode([token_id])
        # A part of a character decodes to U+FFFD, and some tokenizers drop spaces at the ends of a text.
        return "\ufffd" in word or any(text[-1:] in word or text[-1:].isspace() for text in texts)

    def complete(self, token_ids: list[int], texts: tuple[str, ...]) -> bool:
        """Whether the text of the newest tokens contains one of `texts`. `token_ids` are the last `span(texts)` tokens,
        or all tokens if there are fewer."""
        text = self._decode(token_ids)
        return any(stop in text for stop in texts)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def span(texts: tuple[str, ...]) -> int:
    """Return the number of newest tokens that can contain a stop string of `texts`: a string of n characters lies
    within n tokens plus the bytes of a split character before them."""
    return max(map(len, texts)) + 4
