"""One tracker that follows one run: it sends new pieces and remembers which ones have arrived."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mtrl.record.run_dir import RunDir
from mtrl.trackers.backend import RefusedItemError, ReopenError, TrackerBackend
from mtrl.trackers.folder import Folder, Reading, count
from mtrl.trackers.items import Artifact, Ended, Item, MetricsRow, RunSettings, SentTrajectory, UnreadableItem, Whole
from mtrl.trackers.receipts import Receipts, folder_of
from mtrl.utils.text import one_line


class Follower:
    """Holds the journal of one run and one tracker.

    Raises:
        BusyError: Another process holds the journal.
    """

    def __init__(self, backend: TrackerBackend, run: RunDir, started: int, reading: Reading):
        self.backend = backend
        self.receipts = Receipts(folder_of(run), backend.name, backend.destination)
        self.folder = Folder(run, self.receipts, started, reading)
        self._is_open = False

    def advance(self, final: bool = False, is_over: bool = False) -> int:
        """Send the new pieces, and return their number. The arguments are those of `Folder.pending`.

        Raises:
            Exception: Any error of the tracker. Pieces sent before it are remembered; the rest is still to be sent.
        """
        before = self.receipts.sent
        if not self._is_open:
            if not self.was_cut_off and next(self.folder.pending(final, is_over), None) is None:
                return 0
            self._open()
        try:
            self._send_all(final, is_over)
        except ReopenError:
            self.close()
            self._open()
            self._send_all(final, is_over)
        return self.receipts.sent - before

    @property
    def was_cut_off(self) -> bool:
        """Whether the tracker holds pieces that may not have arrived, as after a kill."""
        return self.receipts.remote.get("held") == "yes"

    def close(self) -> None:
        """Close the tracker, so that all sent pieces arrive. The follower holds the journal and may send again."""
        if self._is_open:
            self._is_open = False
            self.backend.close()
            if self.was_cut_off:
                self.receipts.remember(held="no")

    def release(self) -> None:
        """Release the journal, so that another process can send."""
        self.receipts.close()

    def left(self) -> dict[str, int]:
        """Return the number of unsent pieces of each kind: `{"rows": 3, "trajectories": 64, "files": 2}`."""
        ours = self.folder  # another thread may be using it
        fresh = Folder(ours.run.dir, self.receipts, ours.started, ours.reading)
        return count(fresh.pending(final=True))

    def refusals(self) -> str:
        """Return a sentence about the refused pieces, with the last of them and its reason; empty if there are none."""
        refused = self.receipts.refused
        if not refused:
            return ""
        key, why = list(refused.items())[-1]
        return one_line(f"{self.backend.name} refused {len(refused)} of the run's pieces, such as {key}: {why}", 600)

    def url(self) -> str:
        return self.backend.url(self.receipts.remote)

    def hint(self) -> str:
        return self.backend.hint(self.receipts.remote)

    def _open(self) -> None:
        self.backend.open(self.receipts, self.folder.first_step())
        self._is_open = True
        if self.backend.is_buffered:
            self.receipts.remember(held="yes")
        self.folder.restart()

    def _send_all(self, final: bool, is_over: bool) -> None:
        for batch in self.folder.pending(final, is_over):
            for item in batch:
                if isinstance(item, UnreadableItem):
                    self.receipts.refuse(item, item.why)
            self._send([item for item in batch if not isinstance(item, UnreadableItem)])

    def _send(self, batch: list[Any]) -> None:
        """Send a batch. If it is refused, send its pieces one by one, so that a bad piece does not block the others."""
        if not batch:
            return
        try:
            self._hand_over(batch)
        except RefusedItemError as error:
            if len(batch) == 1:
                self.receipts.refuse(batch[0], one_line(error))
                return
            for item in batch:
                self._send([item])
            return
        self.receipts.add(batch)

    def _hand_over(self, batch: list[Any]) -> None:
        backend, kind = self.backend, type(batch[0])
        calls: dict[type[Item], Callable[[Sequence[Any]], None]] = {
            RunSettings: lambda items: backend.send_settings(items[0]),
            MetricsRow: backend.send_rows,
            SentTrajectory: backend.send_episodes,
            Artifact: lambda items: backend.send_artifact(items[0]),
            Ended: lambda items: backend.send_ended(items[0]),
            Whole: lambda items: None,
        }
        calls[kind](batch)
