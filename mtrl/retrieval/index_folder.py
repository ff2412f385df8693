"""A folder of dense indexes, which caches the vectors of corpora."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from mtrl.errors import UserError
from mtrl.retrieval.passage import Passage
from mtrl.utils.files import in_home


class IndexFolder:
    """The subfolder of one index, named by a hash of corpus and encoder.

    It holds `vectors.faiss`, `encoder.safetensors` (the encoder's state for the corpus) and `about.json`.
    """

    def __init__(self, faiss: Any, folder: str | Path, passages: Sequence[Passage], fingerprint: str):
        self._faiss = faiss
        self._count = len(passages)
        self._about = {"passages": len(passages), "corpus": corpus_hash(passages), "encoder": fingerprint}
        name = hashlib.sha256(json.dumps(self._about, sort_keys=True).encode()).hexdigest()[:32]
        self.path = in_home(folder) / name

    def read(self) -> tuple[Any, dict[str, np.ndarray]] | None:
        """Read the FAISS index and the encoder's state; None if they do not exist.

        Raises:
            UserError: the files exist but cannot be read.
        """
        if not self.path.is_dir():
            return None
        try:
            index = self._faiss.read_index(str(self.path / "vectors.faiss"))
            state = load_file(self.path / "encoder.safetensors")
        except (RuntimeError, OSError, SafetensorError) as error:
            raise UserError(f"index {self.path} cannot be read ({error}); delete the folder") from error
        if index.ntotal != self._count:
            raise UserError(f"index {self.path} has {index.ntotal} vectors, not {self._count}; delete the folder")
        return index, state

    def write(self, index: Any, state: dict[str, np.ndarray]) -> None:
        """Write the index into a temporary folder and rename it, so that other processes see the whole index or none.

        Raises:
            UserError: the folder cannot be written.
        """
        beside = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            beside = Path(tempfile.mkdtemp(dir=self.path.parent, prefix="part-"))
            self._faiss.write_index(index, str(beside / "vectors.faiss"))
            save_file(state, beside / "encoder.safetensors")
            (beside / "about.json").write_text(json.dumps(self._about, indent=2) + "\n", encoding="utf-8")
            beside.rename(self.path)
        except (RuntimeError, OSError) as error:
            if not self.path.is_dir():  # otherwise another process was faster
                raise UserError(f"index {self.path.parent} cannot be written ({error}); give another folder") from error
        finally:
            if beside is not None:
                shutil.rmtree(beside, ignore_errors=True)


def corpus_hash(passages: Sequence[Passage]) -> str:
    """Return the SHA-256 of the passages in their order."""
    digest = hashlib.sha256()
    for passage in passages:
        digest.update(json.dumps([passage.id, passage.title, passage.text]).encode() + b"\n")
    return digest.hexdigest()
