"""Dense retrieval: passages with vectors near the query's, by FAISS (https://github.com/facebookresearch/faiss)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mtrl.errors import UserError, missing_extra
from mtrl.retrieval.encoders import Encoder, make_encoder
from mtrl.retrieval.index_folder import IndexFolder
from mtrl.retrieval.passage import Passage
from mtrl.retrieval.retriever import Hit, clean_queries

_SLACK = 1e-4
"""Upper bound of the error of FAISS' float32 sums, for vectors of length 1."""
_DECIMALS = 6


class DenseRetriever:
    """Exact search of all vectors. It needs the extra [search].

    Scores are cosines, rounded to 6 decimals, so that rounding errors do not decide ranks. The nearest passage is a hit
    however small its cosine; only a query without any feature known to the encoder has no hits. A search takes one
    thread.

    Args:
        encoder: "hashing", or the folder or Hub name of a transformers encoder; see `make_encoder`.
        index: folder in which vectors are cached: those of the same corpus and encoder are reused.
        encoder_options: options of `HashingEncoder` or `SentenceEncoder`.

    Raises:
        UserError: there are no passages, FAISS is missing, or the encoder or an option does not exist.
    """

    def __init__(
        self,
        passages: Sequence[Passage],
        encoder: str | Encoder = "hashing",
        index: str | Path | None = None,
        **encoder_options: Any,
    ):
        if not passages:
            raise UserError("retriever dense has no passages; give a corpus with at least one")
        self._faiss = import_faiss()
        self.passages = list(passages)
        self._encoder = make_encoder(encoder, **encoder_options) if isinstance(encoder, str) else encoder
        folder = None if index is None else IndexFolder(self._faiss, index, self.passages, self._encoder.fingerprint)
        found = folder.read() if folder else None
        if found is not None:
            self._index, state = found
            self._encoder.restore(state)
        else:
            texts = [passage.contents for passage in self.passages]
            self._encoder.fit(texts)
            vectors = self._encoder.encode_passages(texts)
            self._index = self._faiss.IndexFlatIP(vectors.shape[1])
            self._index.add(vectors)
            if folder:
                folder.write(self._index, self._encoder.state)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        hits: list[list[Hit]] = [[] for _ in queries]
        pending = [(place, query) for place, query in enumerate(clean_queries(queries, topk)) if query]
        vectors = self._encoder.encode_queries([query for _, query in pending])
        with _one_thread(self._faiss):
            for (place, _), vector in zip(pending, vectors, strict=True):
                if vector.any():
                    hits[place] = self._nearest(vector, min(topk, len(self.passages)))
        return hits

    def _nearest(self, vector: np.ndarray, topk: int) -> list[Hit]:
        """Return the nearest passages. FAISS finds the candidates, including ties; exact cosines order them."""
        cosines, _ = self._index.search(vector[None], topk)
        _, _, candidates = self._index.range_search(vector[None], float(cosines[0, -1]) - _SLACK)
        candidates.sort()
        rows = self._index.reconstruct_batch(candidates).astype(np.float64)
        scores = (rows * vector).sum(axis=1).round(_DECIMALS) + 0.0  # turns -0.0 into 0.0
        best = np.argsort(-scores, kind="stable")[:topk]
        return [Hit(self.passages[candidates[index]], float(scores[index])) for index in best]


def import_faiss() -> Any:
    """Return the module `faiss`, or raise the error that names the extra."""
    try:
        import faiss
    except ImportError as error:
        raise missing_extra("faiss", "search") from error
    return faiss


@contextmanager
def _one_thread(faiss: Any) -> Iterator[None]:
    """Limit FAISS to one thread, because searches run concurrently. The setting affects only the calling thread."""
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
