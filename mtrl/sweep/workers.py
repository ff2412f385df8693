"""Jobs in worker processes of joblib, which kills all of them in the middle of a step where its wait is interrupted or
one of them ends by an exception. So signals come to the sweep, each worker is told once, and its job saves itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from hydra.core.hydra_config import HydraConfig

from mtrl.errors import Interrupted, UserError
from mtrl.generator.engines.server.keeper import PR_SET_PDEATHSIG, prctl
from mtrl.trainer.interrupt import Interrupt

JOBLIB = "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"
LOKY = "joblib.externals.loky"
"""What makes joblib's workers; others' children are none of them."""


@contextmanager
def stopping() -> Iterator[None]:
    """In the process of the sweep: the first signal ends it when all workers have saved, or at once where there are
    none; a second one does not wait for them.

    Raises:
        Interrupted: a signal came.
        UserError: a worker was killed.
    """

    def hand_on() -> None:
        workers = [child.pid for child in multiprocessing.active_children() if type(child).__module__.startswith(LOKY)]
        for pid in filter(None, workers):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        if not workers:
            raise Interrupted(str(interrupt.requested))

    with Interrupt(hand_on) as interrupt:
        try:
            yield
        except (Exception, Interrupted) as error:
            if interrupt.requested:
                raise Interrupted(interrupt.requested) from error
            if type(error).__name__ != "TerminatedWorkerError":  # of joblib, which may not be installed
                raise
            raise UserError(
                "a worker process was killed, probably for want of memory, and joblib has ended the others; go on with "
                "a smaller hydra.launcher.n_jobs"
            ) from error
    if interrupt.requested:
        raise Interrupted(interrupt.requested)


class Worker:
    """This process, where it is a worker of joblib."""

    def __init__(self) -> None:
        self.entered = self.asked = self.busy = False

    @contextmanager
    def working(self) -> Iterator[bool]:
        """Around each job; gives whether it may begin. Where SIGTERM has come, this job ends by `Interrupted`, and none
        begins after it."""
        if not self.entered:
            self.entered = True
            os.setpgid(0, 0)  # the terminal's Ctrl-C comes to the sweep alone, and from there once
            with suppress(AttributeError):  # Linux alone has it
                prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            signal.signal(signal.SIGTERM, self._on_signal)
        self.busy = not self.asked
        try:
            yield self.busy
        except Interrupted:
            self.asked = True
        finally:
            self.busy = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if self.busy:
            raise Interrupted(signal.Signals(number).name)


WORKER = Worker()


def is_worker() -> bool:
    """Whether this job runs in a worker process of joblib."""
    return bool(HydraConfig.get().launcher._target_ == JOBLIB)
