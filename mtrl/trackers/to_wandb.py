"""Weights & Biases: metrics by step, and a table for every file of trajectories; online, or into files for later."""

from __future__ import annotations

import logging
import netrc
import os
import shlex
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mtrl.errors import UserError
from mtrl.scoring.measures import episode_tokens
from mtrl.trackers.backend import BackendInputs, RefusedItemError
from mtrl.trackers.items import Artifact, Ended, MetricsRow, RunSettings, SentTrajectory, conversation, step_of
from mtrl.trackers.receipts import Receipts
from mtrl.utils.files import in_home
from mtrl.utils.text import one_line

INIT_SECONDS = 30.0
LONGEST_CONVERSATION = 20_000
COLUMNS = (
    "line",
    "task_id",
    "group_id",
    "index",
    "reward",
    "score",
    "verdict",
    "stop_reason",
    "turns",
    "tokens",
    "text",
)


class ToWandb:
    """One run of W&B with mtrl's id, so that a resumed run continues it.

    W&B sends in a separate process, so a piece has not arrived yet when its call returns. After a kill, W&B reports its
    last step and receives the steps after it. Offline there is no server to ask, so every opening writes the whole run.
    """

    name = "wandb"
    episodes_at_once: int | None = None
    is_buffered = True

    def __init__(self, place: BackendInputs):
        self.place = place
        self.is_offline = place.tracker.wandb.mode == "offline"
        self._run: Any
        self._last = -1
        self._exit_code: int | None = None

    @property
    def destination(self) -> str:
        return f"{self.place.tracker.wandb.mode} {self.place.tracker.wandb.entity or ''}/{self.place.tracker.project}"

    def url(self, remote: dict[str, str]) -> str:
        folder = str(self.place.run.path / "wandb")
        return folder if self.is_offline else remote.get("url", "https://wandb.ai")

    def hint(self, remote: dict[str, str]) -> str:
        newest = str(self.place.run.path / "wandb" / "latest-run")
        return shlex.join(["wandb", "sync", newest]) if self.is_offline else ""

    def open(self, receipts: Receipts, first_step: int) -> None:
        for name in ("WANDB_SILENT", "WANDB_DISABLE_WEAVE"):  # otherwise W&B prints on the run's console
            os.environ.setdefault(name, "true")
        import wandb

        if not (self.is_offline or _has_key(wandb.setup().settings)):
            raise UserError("W&B has no API key; run `wandb login`, or set tracker.wandb.mode=offline")
        logging.getLogger("wandb").setLevel(logging.ERROR)
        settings = wandb.Settings(console="off", silent=True, init_timeout=INIT_SECONDS, disable_code=True)
        self._run = wandb.init(
            id=self.place.identity.id,
            name=self.place.identity.name,
            project=self.place.tracker.project,
            entity=self.place.tracker.wandb.entity,
            mode=self.place.tracker.wandb.mode,
            dir=str(self.place.run.path),
            resume=None if self.is_offline else "allow",
            reinit="create_new",
            settings=settings,
        )
        known = 0 if self.is_offline or not self._run.resumed else self._run.step
        receipts.forget(lambda key: not known or step_of(key) >= known)
        self._last = known - 1
        self._exit_code = None
        if not self.is_offline:
            receipts.remember(url=self._run.url)

    def send_settings(self, settings: RunSettings) -> None:
        self._run.config.update({**settings.values, "mtrl": self.place.identity.facts}, allow_val_change=True)

    def send_rows(self, rows: Sequence[MetricsRow]) -> None:
        for row in rows:
            if row.step < self._last:
                raise RefusedItemError(f"W&B stores only the first values of a step, and step {row.step} was repeated")
            self._run.log(dict(row.metrics), step=row.step)
            self._last = row.step

    def send_episodes(self, episodes: Sequence[SentTrajectory]) -> None:
        import wandb

        table = wandb.Table(columns=list(COLUMNS), data=[_cells(episode) for episode in episodes])
        self._run.log({f"trajectories/{episodes[0].file}": table}, step=max(0, self._last))

    def send_artifact(self, artifact: Artifact) -> None:
        copy = Path(self._run.dir) / artifact.path.name  # W&B would only link to a file of another folder
        shutil.copyfile(artifact.path, copy)
        self._run.save(str(copy), base_path=self._run.dir, policy="now")

    def send_ended(self, ended: Ended) -> None:
        self._exit_code = 0 if ended.finished else 1

    def close(self) -> None:
        self._run.finish(exit_code=self._exit_code)


def _cells(episode: SentTrajectory) -> list[Any]:
    trajectory = episode.trajectory
    return [
        episode.line,
        one_line(trajectory.task_id),
        one_line(trajectory.group_id),
        trajectory.index,
        trajectory.reward,
        trajectory.score,
        episode.verdict,
        str(trajectory.stop_reason),
        len(trajectory.turns),
        episode_tokens(trajectory),
        conversation(trajectory, LONGEST_CONVERSATION),
    ]


def _has_key(settings: Any) -> bool:
    """Whether W&B will find an API key. Without a key it would prompt at the terminal, which a run must not do."""
    if os.environ.get("WANDB_API_KEY") or getattr(settings, "api_key", None):
        return True
    if getattr(settings, "identity_token_file", None):
        return True
    host = urlsplit(settings.base_url).hostname or ""
    for name in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        with suppress(OSError, netrc.NetrcParseError):
            if name and netrc.netrc(in_home(name)).authenticators(host):
                return True
    return False
