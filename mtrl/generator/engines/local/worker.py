"""The process of a `ProcessEngine`: `python -m mtrl.generator.engines.local.worker MESSAGES FILES PARENT`, where the
first two are inherited sockets and the third is the parent's process id.

It ends when its parent does, however that ends. It does not heed Ctrl-C, SIGTERM or SIGUSR1, which schedulers send to
all processes of a job: the parent finishes its step first, and then ends it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # those of `mtrl.trainer.interrupt`
        signal.signal(number, signal.SIG_IGN)
    messages, files, parent = map(int, sys.argv[1:])
    # A thread of its own, since a long forward pass keeps the main one from looking.
    threading.Thread(target=_end_with, args=(parent, files), daemon=True).start()
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

    from mtrl.generator.engines.local.serving import serve

    serve(messages, files)


def _end_with(parent: int, files: int) -> None:
    """End this process when the parent dies, or closes its side."""
    poll = select.poll()
    poll.register(files, 0)  # hang-ups are always told
    try:
        # The socket alone may be held open by other children of the parent.
        poll.register(os.pidfd_open(parent), select.POLLIN)
    except (AttributeError, OSError):  # not Linux, or the parent is gone already
        if os.getppid() != parent:
            os._exit(0)
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    main()
