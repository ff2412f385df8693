"""The process of a `ProcessEngine`: `python -m mtrl.engines.local.worker MESSAGES FILES PARENT`, where the
first two are inherited sockets and the third is the parent's process id.

It ends when its parent ends, for any reason. It ignores Ctrl-C, SIGTERM and SIGUSR1, which schedulers send to all
processes of a job: the parent finishes its training step first, and then ends this process.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # the signals of `mtrl.utils.signals`
        signal.signal(number, signal.SIG_IGN)
    messages, files, parent = map(int, sys.argv[1:])
    # A separate thread, because a long forward pass blocks the main one.
    threading.Thread(target=_end_with, args=(parent, files), daemon=True).start()
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

    from mtrl.engines.local.serving import serve

    serve(messages, files)


def _end_with(parent: int, files: int) -> None:
    """End this process when the parent dies, or closes its side."""
    poll = select.poll()
    poll.register(files, 0)  # poll always reports hang-ups
    try:
        # The socket alone is not enough: other children of the parent may hold it open.
        poll.register(os.pidfd_open(parent), select.POLLIN)
    except (AttributeError, OSError):  # not Linux, or the parent has ended already
        if os.getppid() != parent:
            os._exit(0)
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    main()
