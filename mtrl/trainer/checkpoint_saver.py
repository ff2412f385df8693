"""Who writes checkpoints on a rank: at once, or in a thread while training goes on.

The leader saves in this order: `wait`, `Checkpoints.begin`, `save` on every rank, `finish` on itself; what `finish` is
given runs when every rank has written, and holds copies of what it writes. At the end of a run every rank waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from mtrl.trainer.checkpoint_tensors import Shards, write_shards


class Saver:
    """Writes while training waits."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        """`group`: of gloo, all ranks, with no other use; None: one process."""
        self.group = group

    def save(self, tensors: Mapping[str, Tensor], folder: Path) -> None:
        """Write this rank's shards of `tensors`, as they are now; all ranks together, as `save_tensors`.

        Raises:
            UserError: this checkpoint, or the one before, could not be written.
        """
        write_shards(Shards.of(tensors), folder, self.group)

    def finish(self, commit: Callable[[], object]) -> None:
        """Commit what was saved last, once every rank has written it.

        Raises:
            UserError: as `commit` does.
        """
        commit()

    @property
    def is_busy(self) -> bool:
        """Whether something that was begun goes on."""
        return False

    def wait(self) -> None:
        """Return when all that was begun is over.

        Raises:
            UserError: it could not be written.
        """


class BackgroundSaver(Saver):
    """Copies, then writes in a thread; what fails there is raised by the next call. One checkpoint at a time."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        super().__init__(group)
        self._tasks: list[_Task] = []

    def save(self, tensors: Mapping[str, Tensor], folder: Path) -> None:
        self.wait()
        shards = Shards.of(tensors)
        self._tasks.append(_Task(lambda: write_shards(shards, folder, self.group)))

    def finish(self, commit: Callable[[], object]) -> None:
        written = self._tasks[-1]

        def after() -> None:
            written.join()
            if written.error is None:
                commit()

        self._tasks.append(_Task(after))

    @property
    def is_busy(self) -> bool:
        return any(task.is_alive() for task in self._tasks)

    def wait(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.join()
        for task in tasks:
            if task.error is not None:
                raise task.error


class _Task(threading.Thread):
    """A daemon, so that a rank whose peers are gone can end: nothing but a half-written folder is lost with it."""

    def __init__(self, work: Callable[[], object]):
        super().__init__(name="checkpoint", daemon=True)
        self.work = work
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.work()
        except BaseException as error:
            self.error = error
