"""Ids of the experts that an engine chose for the tokens of a mixture: arrays in engines and samples, text in turns.

A row [layers, k] of an array belongs to one token: in each layer with experts, the k experts that computed it; -1 where
they are unknown. The ids have the narrowest dtype, since a large model has hundreds of them per token. Functions import
numpy when they are called, so that commands without experts need no numpy.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ExpertIds: TypeAlias = "NDArray[np.signedinteger]"
"""[tokens, layers, k] ids; -1: unknown."""

DTYPES = ("int8", "int16")


def dtype_of(experts: int) -> str:
    """Return the narrowest dtype for the ids of so many experts and -1."""
    return DTYPES[experts > 128]


def to_text(ids: ExpertIds) -> str:
    """Return the ids as text, `dtype:layers:k:base64`, little-endian."""
    import numpy as np

    _, layers, k = ids.shape
    data = np.ascontiguousarray(ids, ids.dtype.newbyteorder("<")).tobytes()
    return f"{ids.dtype.name}:{layers}:{k}:{base64.b64encode(data).decode()}"


def from_text(text: str) -> ExpertIds:
    """Return the ids from the text of `to_text`.

    Raises:
        ValueError: the text is not of that form.
    """
    import numpy as np

    dtype, layers, k, data = text.split(":")
    if dtype not in DTYPES or int(layers) < 1 or int(k) < 1:
        raise ValueError(f"{text[:40]!r} does not describe ids of experts")
    found = np.frombuffer(base64.b64decode(data, validate=True), np.dtype(dtype).newbyteorder("<"))
    return found.reshape(-1, int(layers), int(k)).astype(dtype)


def before_last_tokens(computed: ExpertIds | None, tokens: int) -> str | None:
    """Return, as text, the row of the token before each of the last `tokens` tokens of a context; None without ids.

    Args:
        computed: rows of all tokens of the context but the last one, which no pass has computed yet. Rows may be
            missing at the start.
    """
    if computed is None:
        return None
    import numpy as np

    known = computed[len(computed) - min(tokens, len(computed)) :]
    unknown = np.full((tokens - len(known), *computed.shape[1:]), -1, computed.dtype)
    return to_text(np.concatenate([unknown, known]))


def first_rows(text: str | None, tokens: int) -> str | None:
    """Return the first `tokens` rows of the ids of a text, as text; None without ids."""
    return None if text is None else to_text(from_text(text)[:tokens])


def joined(parts: Sequence[tuple[str | None, int]]) -> ExpertIds | None:
    """Return the rows of consecutive parts of a sequence, each given by its text and its number of tokens; -1 for the
    tokens of a part without text. The result is None if no part has a text.

    Raises:
        ValueError: a text has another number of rows, or of layers or choices than the others.
    """
    found = [None if text is None else from_text(text) for text, _ in parts]
    known = [ids for ids in found if ids is not None]
    if not known:
        return None
    import numpy as np

    shape, dtype = known[0].shape[1:], max((ids.dtype for ids in known), key=lambda dtype: dtype.itemsize)
    counts = [tokens for _, tokens in parts]
    if any(ids is not None and ids.shape != (tokens, *shape) for ids, tokens in zip(found, counts, strict=True)):
        raise ValueError(f"the ids of experts do not fit turns of {counts} tokens")
    unknown = (np.full((tokens, *shape), -1, dtype) for tokens in counts)
    rows: list[Any] = [fill if ids is None else ids for ids, fill in zip(found, unknown, strict=True)]
    return np.concatenate(rows).astype(dtype, copy=False)
