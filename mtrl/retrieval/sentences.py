"""Sentence encoders: transformers models such as E5, on a GPU or a CPU."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from mtrl.errors import UserError
from mtrl.utils.hub import is_out_of_reach, model_options

log = logging.getLogger(__name__)


class SentenceEncoder:
    """The mean of a transformer's last hidden states over the tokens of a text, scaled to length 1.

    E5 (Wang et al. 2022, https://arxiv.org/abs/2212.03533) and most sentence encoders work like this. The model is in
    float16 on a GPU, and in float32 on a CPU. Queries are encoded one by one, because the padding of a batch would
    change the last digits.

    Args:
        name: folder, or Hub name such as `intfloat/e5-base-v2`.
        query_prefix, passage_prefix: text that is put before each query or passage; default: "query: " and "passage: "
            if the last part of the name contains e5, else nothing.
        max_length: maximum number of tokens of a text, including the prefix; the rest is cut.
        batch_size: number of passages that are encoded at once.
        device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1", ...

    Raises:
        UserError: the model cannot be loaded, or a setting is out of range.
    """

    def __init__(
        self,
        name: str,
        query_prefix: str | None = None,
        passage_prefix: str | None = None,
        max_length: int = 256,
        batch_size: int = 32,
        device: str = "auto",
    ):
        if max_length < 8 or batch_size < 1:
            raise UserError(f"encoder {name}: max_length={max_length} must be at least 8, batch_size={batch_size} 1")
        is_e5 = "e5" in name.rstrip("/").rpartition("/")[2].lower()
        self.query_prefix = ("query: " if is_e5 else "") if query_prefix is None else query_prefix
        self.passage_prefix = ("passage: " if is_e5 else "") if passage_prefix is None else passage_prefix
        self.max_length, self.batch_size = max_length, batch_size
        self._tokenizer, self._model = _load(name, device)
        self._fingerprint: str | None = None
        self._lock = threading.Lock()  # tokenizers refuse to be used by two threads ("Already borrowed")

    def fit(self, passages: Sequence[str]) -> None:
        pass

    def encode_passages(self, passages: Sequence[str]) -> np.ndarray:
        texts = [self.passage_prefix + passage for passage in passages]
        order = sorted(range(len(texts)), key=lambda index: (len(texts[index]), texts[index]))
        vectors = np.empty((len(texts), self.dimension), np.float32)
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            vectors[batch] = self._encode([texts[index] for index in batch])
            if start // self.batch_size % 1000 == 999:
                log.info("encoded %d of %d passages", start, len(order))
        return vectors

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        rows = [self._encode([self.query_prefix + query]) for query in queries]
        return np.concatenate([np.empty((0, self.dimension), np.float32), *rows])

    @property
    def dimension(self) -> int:
        return int(self._model.config.hidden_size)

    @property
    def fingerprint(self) -> str:
        """Hash of the weights and the tokenizer themselves, because the model in a folder may change."""
        if self._fingerprint is None:
            digest = hashlib.sha256()
            for key, tensor in sorted(self._model.state_dict().items()):
                digest.update(f"{key} {tensor.dtype} {list(tensor.shape)}".encode())
                digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
            vocabulary = json.dumps(self._tokenizer.get_vocab(), sort_keys=True)
            settings = [self._model.config.model_type, self.passage_prefix, self.max_length, vocabulary]
            digest.update(json.dumps(settings).encode())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    @property
    def state(self) -> dict[str, np.ndarray]:
        return {}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        pass

    def _encode(self, texts: list[str]) -> np.ndarray:
        import torch

        with self._lock:
            tokens = self._tokenizer(
                texts, padding=True, truncation=True, max_length=self.max_length, return_tensors="pt"
            ).to(self._model.device)
        with torch.inference_mode():
            hidden = self._model(**tokens).last_hidden_state.float()
            mask = tokens["attention_mask"][..., None]
            mean = (hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
            return torch.nn.functional.normalize(mean, dim=-1).cpu().numpy()


def _load(name: str, device: str) -> tuple[Any, Any]:
    """Load the tokenizer and the model, ready to encode."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    dtype = torch.float16 if chosen.startswith("cuda") else torch.float32
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=is_out_of_reach(name))
        model = AutoModel.from_pretrained(name, dtype=dtype, **model_options(name))
    except Exception as error:  # OSError if the model does not exist, ValueError and others if it is no model
        raise UserError(
            f"encoder {name} could not be loaded ({type(error).__name__}: {_first_line(error)}); give 'hashing', "
            "the folder of a transformers encoder, or its name on the Hub"
        ) from error
    if model.config.is_encoder_decoder:
        raise UserError(f"encoder {name} is an encoder-decoder; give an encoder such as intfloat/e5-base-v2")
    try:
        return tokenizer, model.eval().to(chosen)
    except (RuntimeError, AssertionError) as error:  # AssertionError if torch was built without CUDA
        raise UserError(
            f"encoder {name}: device={device} cannot be used ({_first_line(error)}); set it to auto or cpu"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no message").splitlines()[0][:200]
