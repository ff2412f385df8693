"""Jobs in worker processes of joblib. joblib kills all workers in the middle of a step if its wait is interrupted or if
one worker ends by an exception. Therefore only the sweep receives signals from the terminal, it forwards each signal
once to every worker, and the worker's job saves its state.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from hydra.core.hydra_config import HydraConfig

from mtrl.engines.server.supervisor import PR_SET_PDEATHSIG, prctl
from mtrl.errors import Interrupted, UserError
from mtrl.utils.signals import Interrupt

JOBLIB = "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"
LOKY = "joblib.externals.loky"
"""Module prefix of the class of joblib's worker processes, which separates them from other child processes."""


@contextmanager
def stopping() -> Iterator[None]:
    """Handle signals in the process of the sweep. The first signal ends the sweep after all workers have saved, or at
    once if there are no workers; a second signal does not wait for the workers.

    Raises:
        Interrupted: a signal came.
        UserError: a worker was killed.
    """

    def forward() -> None:
        workers = [child.pid for child in multiprocessing.active_children() if type(child).__module__.startswith(LOKY)]
        for pid in filter(None, workers):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        if not workers:
            raise Interrupted(str(interrupt.requested))

    with Interrupt(forward) as interrupt:
        try:
            yield
        except (Exception, Interrupted) as error:
            if interrupt.requested:
                raise Interrupted(interrupt.requested) from error
            if type(error).__name__ != "TerminatedWorkerError":  # a class of joblib, which may not be installed
                raise
            raise UserError(
                "a worker process was killed, probably for lack of memory, and joblib has ended the others; resume "
                "with a smaller hydra.launcher.n_jobs"
            ) from error
    if interrupt.requested:
        raise Interrupted(interrupt.requested)


class Worker:
    """State of this process as a worker of joblib."""

    def __init__(self) -> None:
        self.entered = self.stopped = self.busy = False

    @contextmanager
    def working(self) -> Iterator[bool]:
        """Enclose a job, and yield whether it may start. After SIGTERM, the current job ends by `Interrupted`, and no
        further job starts."""
        if not self.entered:
            self.entered = True
            os.setpgid(0, 0)  # so that the terminal's Ctrl-C reaches only the sweep, which forwards it once
            with suppress(AttributeError):  # only Linux has it
                prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            signal.signal(signal.SIGTERM, self._on_signal)
        self.busy = not self.stopped
        try:
            yield self.busy
        except Interrupted:
            self.stopped = True
        finally:
            self.busy = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True
        if self.busy:
            raise Interrupted(signal.Signals(number).name)


WORKER = Worker()


def is_worker() -> bool:
    """Whether this job runs in a worker process of joblib."""
    return bool(HydraConfig.get().launcher._target_ == JOBLIB)
