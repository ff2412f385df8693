"""TensorBoard: event files in the folder of the run, with the metrics and some of the conversations."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from mtrl.trackers.backend import BackendInputs, ReopenError
from mtrl.trackers.items import Artifact, Ended, MetricsRow, RunSettings, SentTrajectory, conversation, step_of
from mtrl.trackers.receipts import Receipts
from mtrl.utils.text import clean, one_line, signed

FOLDER = "tensorboard"
LONGEST_CONVERSATION = 20_000
"""Maximum length of a conversation, in characters; the whole conversation is in trajectories/."""


class ToTensorboard:
    """Writes event files. They cannot be changed, but a new file can invalidate the older ones from a step on."""

    name = "tensorboard"
    episodes_at_once: int | None = None
    is_buffered = False

    def __init__(self, place: BackendInputs):
        self.place = place
        self._writer: Any
        self._last = -1

    @property
    def destination(self) -> str:
        return f"inside the run: {FOLDER}"

    def url(self, remote: dict[str, str]) -> str:
        return str(self.place.run.path / FOLDER)

    def hint(self, remote: dict[str, str]) -> str:
        return shlex.join(["tensorboard", "--logdir", self.url(remote)])

    def open(self, receipts: Receipts, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = self.place.run.path / FOLDER
        if any(folder.glob("events*")):
            receipts.forget(lambda key: step_of(key) >= first_step)
            self._writer = SummaryWriter(str(folder), purge_step=first_step)
        else:  # never written, or removed
            receipts.forget(lambda key: True)
            self._writer = SummaryWriter(str(folder))
        self._last = -1

    def send_settings(self, settings: RunSettings) -> None:
        lines = [f"{name}: {json.dumps(value, default=str)}" for name, value in settings.values.items()]
        self._writer.add_text("config", _code("\n".join(lines)), 0, self.place.identity.started / 1000)
        self._writer.flush()

    def send_rows(self, rows: Sequence[MetricsRow]) -> None:
        for row in rows:
            if row.step <= self._last:
                raise ReopenError
            for name, value in row.metrics.items():
                self._writer.add_scalar(name, value, row.step, row.milliseconds / 1000)
            self._last = row.step
        self._writer.flush()

    def send_episodes(self, episodes: Sequence[SentTrajectory]) -> None:
        """Send the best and the worst trajectory of a file, and one per verdict on which reward and scorer disagree."""
        ranked = sorted(episodes, key=lambda episode: episode.trajectory.reward)
        shown = {"best": ranked[-1], "worst": ranked[0]}
        shown |= {episode.verdict: episode for episode in episodes if episode.verdict != "agree"}
        for name, episode in shown.items():
            seconds = episode.milliseconds / 1000
            text = _code(_headed(episode))
            self._writer.add_text(f"{episode.kind}/{name}", text, episode.step, seconds)
        self._writer.flush()

    def send_artifact(self, artifact: Artifact) -> None:
        """Do nothing: the file is in the folder of the run, beside the event files."""

    def send_ended(self, ended: Ended) -> None:
        """Do nothing: TensorBoard has no end of a run."""

    def close(self) -> None:
        self._writer.close()


def _headed(episode: SentTrajectory) -> str:
    trajectory = episode.trajectory
    score = "none" if trajectory.score is None else f"{trajectory.score:g}"
    verdict = f"reward {signed(trajectory.reward)}, score {score}, {episode.verdict}, {trajectory.stop_reason}"
    return f"{one_line(trajectory.task_id)}: {verdict}\n{conversation(trajectory, LONGEST_CONVERSATION)}"


def _code(text: str) -> str:
    """Return the text as a code block, in which TensorBoard interprets no Markdown."""
    return "\n".join(f"    {line}" for line in clean(text).split("\n"))
