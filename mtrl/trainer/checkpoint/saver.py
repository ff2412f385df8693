"""Writers of checkpoints on a rank: directly, or in a thread while training continues.

The leader saves in this order: `wait`, `Checkpoints.begin`, `save` on every rank, `finish` on itself. The function
given to `finish` runs when every rank has written, and must hold copies of the data that it writes. Every rank calls
`wait` at the end of a run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from mtrl.trainer.checkpoint.tensors import Shards, write_shards


class Saver:
    """Writes checkpoints directly, while training waits."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        """`group` is a gloo group of all ranks without other use; None: a single process."""
        self.group = group

    def save(self, tensors: Mapping[str, Tensor], folder: Path) -> None:
        """Write the current values of this rank's shards of `tensors`. All ranks must call it, as `write_shards`.

        Raises:
            UserError: this checkpoint, or the one before, could not be written.
        """
        write_shards(Shards.of(tensors), folder, self.group)

    def finish(self, commit: Callable[[], object]) -> None:
        """Call `commit` for the checkpoint that was saved last, once every rank has written it.

        Raises:
            UserError: `commit` raised it.
        """
        commit()

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is still being written."""
        return False

    def wait(self) -> None:
        """Return when no checkpoint is being written any more.

        Raises:
            UserError: a checkpoint could not be written.
        """


class BackgroundSaver(Saver):
    """Copies the tensors, then writes them in a thread, one checkpoint at a time. An error in the thread is raised by
    the next call of `save` or `wait`."""

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
    """A thread that stores its exception. It is a daemon, so that a rank whose peers are lost can end; only an
    incomplete folder is lost with it."""

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
