"""A module that runs as `python -m MODULE WORDS…` does, and gets SIGTERM when the process that started it ends::

    python -m mtrl.command.attached MODULE WORDS…

A command of the Python API has a session of its own (`mtrl.api.run_command`), so the end of a notebook's kernel, which
kills the processes of the kernel's group, would not end it.
"""

from __future__ import annotations

import runpy
import signal
import sys
from contextlib import suppress

from mtrl.engines.server.supervisor import PR_SET_PDEATHSIG, prctl

if __name__ == "__main__":
    with suppress(AttributeError):  # only Linux has it
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    module, *sys.argv[1:] = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
