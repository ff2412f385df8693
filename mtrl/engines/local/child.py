"""The parent's handle of the process of a `ProcessEngine`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress

from mtrl.engines.local.channel import Channel
from mtrl.utils.gpus import gpu_names

WORKER = "mtrl.engines.local.worker"
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Child:
    """A child process with a fresh interpreter, which inherits no state of the parent (threads, CUDA, a script without
    a main guard).

    The child has its own session, so that Ctrl-C in a terminal does not reach it.
    """

    def __init__(self, threads: int, gpu: int | None = None):
        """Start the process with this number of CPU threads. It sees only the GPU with the index `gpu` in this process;
        None: it sees the GPUs of this process."""
        ours, theirs = socket.socketpair()
        our_files, their_files = socket.socketpair()
        with theirs, their_files:
            inherited = (theirs.fileno(), their_files.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", WORKER, *map(str, inherited), str(os.getpid())],
                pass_fds=inherited,
                env=environment_of(threads, gpu),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.channel = Channel(ours, our_files)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Kill the process; the reader of the channel notices its end."""
        with suppress(ProcessLookupError):
            self._process.kill()

    def end(self) -> str:
        """Make sure that the process has ended, and return a phrase about how it ended."""
        self.channel.close()
        try:
            code = self._process.wait(1)  # the process ends by itself when the channel is closed
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


def environment_of(threads: int, gpu: int | None) -> dict[str, str]:
    """Return the environment variables of a process, see `Child`.

    Raises:
        UserError: this process sees no GPU with that index.
    """
    environment = {
        **os.environ,
        **dict.fromkeys(THREAD_VARIABLES, str(threads)),  # read when torch is imported
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    return environment if gpu is None else environment | {"CUDA_VISIBLE_DEVICES": gpu_names([gpu])[0]}
