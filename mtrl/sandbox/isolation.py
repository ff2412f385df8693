"""Checks that commands can be isolated on this machine, by isolating one."""

from __future__ import annotations

import os
import sys
import threading

from mtrl.errors import UserError
from mtrl.sandbox.bubblewrap import OWN_PYTHON, Namespace, find_programs, forbidden
from mtrl.sandbox.execution import Execution
from mtrl.sandbox.limits import ProcessLimits, SandboxError
from mtrl.sandbox.seccomp import denied_system_calls
from mtrl.utils.process import allow_open_files

_OLDEST_KERNEL = (5, 14)
_PRIVILEGES = {"CapEff": "0000000000000000", "NoNewPrivs": "1", "Seccomp": "2"}
_VERSION = f"import json, sys; print(*sys.version.split() if sys.prefix == '{OWN_PYTHON}' else '')"
_OPEN_FILES = 16384
"""Number of open files that the process should be allowed. Hundreds of sandboxes hold 3 descriptors each, and 6 more
while a command runs; the usual soft limit is 1024."""
CHECKED = threading.Event()
"""Set once a command ran isolated in this process."""
_lock = threading.Lock()


def check_isolation() -> None:
    """Check once per process that commands run isolated; later calls cost nothing. Set-up and pre-flight call it.

    Raises:
        UserError: something is missing or forbidden; the message names it, and how to install or permit it.
    """
    with _lock:
        if not CHECKED.is_set():
            _check_machine()
            _check_command()
            allow_open_files(_OPEN_FILES)
            CHECKED.set()


def _check_machine() -> None:
    find_programs()
    denied_system_calls()
    release = os.uname().release
    if tuple(int(part) for part in release.split("-")[0].split(".")[:2]) < _OLDEST_KERNEL:
        raise UserError(
            f"the process sandbox needs Linux {'.'.join(map(str, _OLDEST_KERNEL))} or newer, and this is {release}: "
            "older ones count the processes of all sandboxes together; use a newer kernel"
        )
    if not os.path.exists(f"/proc/self/task/{threading.get_native_id()}/children"):
        raise UserError(
            f"the process sandbox cannot find its processes in /proc, because Linux {release} was built without "
            "CONFIG_PROC_CHILDREN or /proc is not mounted; use a kernel with it"
        )


def _check_command() -> None:
    """Run a command, and read its privileges from the kernel."""
    limits = ProcessLimits()
    namespace = Namespace(limits)
    try:
        status = Execution(namespace, ["cat", "/proc/self/status"], limits).wait(limits.seconds)
        python = Execution(namespace, ["python3", "-c", _VERSION], limits).wait(limits.seconds)
    except SandboxError as error:
        raise UserError(forbidden(str(error))) from error
    finally:
        namespace.close()
    found = dict(line.split(":\t", 1) for line in status.stdout.splitlines() if ":\t" in line)
    for name, expected in _PRIVILEGES.items():
        if found.get(name) != expected:
            raise UserError(forbidden(f"{name} is {found.get(name)} instead of {expected}; {status.stderr}"))
    loaded, own = python.stdout.split(), sys.version.split()  # nothing is loaded from /opt by a Python of the system
    if python.exit_code or (loaded and loaded != own):
        reason = " ".join(python.stderr.split() if python.exit_code else ["it loads the library of Python", *loaded])
        raise UserError(
            f"this Python does not run inside the sandbox ({reason[:200]}); use one that is installed under /usr, or "
            "one built without --enable-shared"
        )
