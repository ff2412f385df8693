"""A root file system for real containers, made of this machine's own programs, so that tests need no registry."""

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

PROGRAMS = ("bash", "cat", "chmod", "find", "head", "ls", "mkdir", "mv", "rm", "sleep", "timeout", "tr", "wc", "yes")
IMAGE = "localhost/mtrl-test-root:1"
WRITE_ON = "for ((i = 0; ; i++)); do head -c 4000000 /dev/zero > /app/$i || exit; sleep 0.1; done"
"""Command that writes files until it is stopped."""


def fill(root):
    """Copy `PROGRAMS` and their libraries into a folder."""
    for folder in ("app", "bin", "etc", "proc", "root", "sys", "dev", "tmp"):
        (root / folder).mkdir(parents=True)
    for name in PROGRAMS:
        program = Path(shutil.which(name)).resolve()
        shutil.copy2(program, root / "bin" / name)
        for library in re.findall(r"(/\S+) \(0x", subprocess.check_output(["ldd", program], text=True)):
            place = root / library.lstrip("/")
            if not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(Path(library).resolve(), place)


@cache
def why_no_podman():
    """The reason why Podman cannot run a container on this machine; empty if it can."""
    if shutil.which("podman") is None:
        return "podman is not installed"
    limits = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"]
    command = ["podman", "run", "--rm", "--network", "none", "--memory", "64m", *limits, "--entrypoint", "sleep"]
    done = subprocess.run([*command, IMAGE, "0"], capture_output=True, text=True)  # not by mtrl, whose faults must fail
    return f"podman cannot run a container here: {done.stderr.strip()[-300:]}" if done.returncode else ""


def need_podman(folder):
    """Import the image of the tests into Podman if it is missing, and skip the test if Podman cannot run it."""
    if shutil.which("podman") and subprocess.run(["podman", "image", "exists", IMAGE]).returncode != 0:
        fill(folder / "root")
        with subprocess.Popen(["tar", "-C", folder / "root", "-c", "."], stdout=subprocess.PIPE) as packed:
            subprocess.run(["podman", "import", "-q", "-", IMAGE], stdin=packed.stdout, capture_output=True)
    if reason := why_no_podman():
        pytest.skip(reason)
