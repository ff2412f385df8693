"""A root file system for real containers, made of this machine's own programs, so that tests need no registry."""

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

PROGRAMS = (
    "bash",
    "cat",
    "chmod",
    "find",
    "head",
    "ls",
    "mkdir",
    "mv",
    "rm",
    "sleep",
    "timeout",
    "tr",
    "unshare",
    "wc",
    "yes",
)
ENGINES = ("podman", "docker")
IMAGE = "localhost/mtrl-test-root:2"
WRITE_ON = "for ((i = 0; ; i++)); do head -c 4000000 /dev/zero > /app/$i || exit; sleep 0.1; done"
"""Command that writes files until it is stopped."""


def fill(root, programs=PROGRAMS):
    """Copy programs and their libraries into a folder."""
    for folder in ("app", "bin", "etc", "proc", "root", "sys", "dev", "tmp"):
        (root / folder).mkdir(parents=True)
    for name in programs:
        program = Path(shutil.which(name)).resolve()
        shutil.copy2(program, root / "bin" / name)
        for library in re.findall(r"(/\S+) \(0x", subprocess.check_output(["ldd", program], text=True)):
            place = root / library.lstrip("/")
            if not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(Path(library).resolve(), place)


@cache
def why_not(engine):
    """The reason why an engine cannot run a container on this machine; empty if it can."""
    if shutil.which(engine) is None:
        return f"{engine} is not installed"
    limits = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"]
    command = [engine, "run", "--rm", "--network", "none", "--memory", "64m", *limits, "--entrypoint", "sleep"]
    done = subprocess.run([*command, IMAGE, "0"], capture_output=True, text=True)  # not by mtrl, whose faults must fail
    printed = [*done.stderr.strip().splitlines(), "it printed nothing"][0]
    return f"{engine} cannot run a container here: {printed[-300:]}" if done.returncode else ""


def has_image(engine, image):
    return subprocess.run([engine, "image", "inspect", image], capture_output=True).returncode == 0


def import_image(engine, root, image):
    """Make an image of a folder."""
    with subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE) as packed:
        subprocess.run([engine, "import", "-", image], stdin=packed.stdout, capture_output=True)


def need_engine(engine, folder):
    """Import the image of the tests into an engine if it is missing, and skip the test if the engine cannot run it.

    Args:
        engine: podman, or docker, whose daemon is found by the variable `DOCKER_HOST` or at its usual place.
    """
    if shutil.which(engine) and not has_image(engine, IMAGE):
        fill(folder / "root")
        import_image(engine, folder / "root", IMAGE)
    if reason := why_not(engine):
        pytest.skip(reason)
