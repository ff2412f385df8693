"""rows.jsonl: the result of every group that was sampled for training and scored, for the statistics of rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtrl.record.metrics import MetricsLog


class RowResults:
    """Writes the results of the rows of a run.

    Each start of the run writes a line with `sources`, which has the settings of the sampler of each source, by name;
    the name is empty in a run on one task. Each step in which groups were scored writes a line with `results`, pairs of
    the id of a row and the share of the episodes of a group on it that succeeded by the scorer, 0 to 1, in the order of
    their scoring. With overlap a checkpoint writes a further line of its step: the results of groups that it stores.
    """

    def __init__(self, path: Path):
        self._log = MetricsLog(path)
        self._results: list[tuple[str, float]] = []

    def start(self, step: int, sources: Mapping[str, Mapping[str, Any]]) -> None:
        """Remove the lines of later steps than `step`, which a resumed run makes again, and write `sources`."""
        self._log.truncate(step if step else -1)
        self._log.log(step, {"sources": sources})

    def note(self, row_id: str, success: float) -> None:
        """Take the result of a group."""
        self._results.append((row_id, success))

    def write(self, step: int) -> None:
        """Write the results since the last line, if there are any, as those of training step `step` (from 1)."""
        if self._results:
            self._log.log(step, {"results": self._results})
            self._results = []

    def close(self) -> None:
        self._log.close()
