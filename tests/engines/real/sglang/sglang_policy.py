"""The weights that a real SGLang server has, as the trainer knows them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from engine_model import changed, load_model, reference_logprobs, worst

from mtrl.engines.base import SamplingParams
from mtrl.engines.server.server_api import ServerApi, TurnRequest
from mtrl.types import Generation

LONG = 2048
"""Number of tokens of a context in which a turn takes long enough for a test to act during the turn."""
_ids = count()


def long_model(source: Path, folder: Path) -> Path:
    """Write a copy of the model for contexts of `LONG` tokens."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LONG}))
    return folder


@dataclass
class Policy:
    """Three sets of weights; each update gives the server the next one."""

    folders: list[Path]
    models: list = field(init=False)
    version: int = 0

    def __post_init__(self):
        self.models = [load_model(folder) for folder in self.folders]

    @classmethod
    def of(cls, start: Path, folder: Path) -> Policy:
        """Return a policy with the initial weights and two other sets."""
        folders = [start]
        for seed in (1, 2):
            other = shutil.copytree(start, folder / str(seed))
            changed(load_model(start), seed, 0.2).save_pretrained(other)
            folders.append(other)
        return cls(folders)

    @property
    def folder(self) -> Path:
        return self.folders[self.version % len(self.folders)]

    @property
    def model(self):
        """The model with the weights that the server has now."""
        return self.model_of(self.version)

    def model_of(self, version: int):
        return self.models[version % len(self.models)]

    async def update(self, api: ServerApi, send: Callable[[], Awaitable[None]] | None = None) -> None:
        """Send the next weights, by default as a folder. The server must be paused, or must sample nothing."""
        self.version += 1
        await api.begin_update()
        await (send() if send else api.receive_folder(str(self.folder), self.version))
        await api.end_update(self.version)

    def distance(self, prompt: Sequence[int], turn: Generation, temperature: float = 1.0) -> float:
        """Return the largest difference of its log-probs from the trainer's, each for its reported version."""
        versions = [version for version, tokens in turn.version_spans for _ in range(tokens)]
        ours = {
            version: reference_logprobs(self.model_of(version), prompt, turn.token_ids, temperature)
            for version in set(versions)
        }
        return worst([ours[version][at] for at, version in enumerate(versions)], turn.logprobs)


def turn_request(prompt: Sequence[int], tokens: int = 16, salt: str | None = None, **sampling) -> TurnRequest:
    return TurnRequest(f"turn-{next(_ids)}", list(prompt), SamplingParams(**sampling), tokens, cache_salt=salt)
