#!/usr/bin/env python3
"""Install an inference engine into its own virtual environment, where the trainer finds it.

    python scripts/install_engine.py vllm|sglang [--cpu|--cuda] [--venv DIR] [--python PY] [--check]

On a machine without an NVIDIA GPU the script installs the CPU build (`requirements/NAME-cpu.txt`): about 2.5 GB and a
few minutes. With a GPU it installs the engine as published (`requirements/NAME.txt`). All packages are pinned. An
interrupted installation resumes, and a finished one returns at once. Packages come from the index that pip is
configured with.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pip_or_uv import attempt, pip_settings, uv_command, uv_settings

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
VERSIONS = ROOT / "mtrl" / "engines" / "server" / "versions.py"
ENGINES = ("vllm", "sglang")
OLDEST, NEWEST = (3, 11), (3, 14)
"""Oldest and newest Python versions for which both engines have wheels."""
GLIBC = {"vllm": (2, 28), "sglang": (2, 34)}
"""Oldest version of glibc that the engine's wheels support."""
GIGABYTES = {"cpu": 4, "cuda": 20}
"""Free disk space for an installation, in GB, including the downloads."""
LOCK = "lock"
STAMPS = ".mtrl"
"""Folder in the environment with a file for every finished step, which holds a digest of the step's content."""
SHOWN = 15
"""Number of lines of a failed installer's output to show."""
SELF_CHECKS = {
    "vllm": "import vllm.engine.arg_utils",
    "sglang": "from mtrl.engines.sglang import platform; platform.declare_operators(); import sglang.srt.server_args",
}
"""Imports that must succeed for a server to start."""
LOADED = "import importlib.metadata as m; assert m.entry_points(group='{group}', name='{name}'), 'no plugin of mtrl'; "
PLUGINS = {
    "vllm": LOADED.format(group="vllm.general_plugins", name="mtrl"),
    "sglang": LOADED.format(group="sglang.srt.platforms", name="mtrl_cpu"),
}


class InstallError(Exception):
    """Error message of one sentence, with the fix."""


@dataclass(frozen=True)
class Interpreter:
    """The properties of a Python interpreter, as it reports them."""

    path: str
    version: tuple[int, int]
    glibc: tuple[int, int]
    """Version of glibc; (0, 0) for another C library."""
    machine: str


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("engine", choices=ENGINES)
    builds = parser.add_mutually_exclusive_group()
    builds.add_argument("--cpu", dest="build", action="store_const", const="cpu", help="without CUDA")
    builds.add_argument("--cuda", dest="build", action="store_const", const="cuda", help="the engine as published")
    parser.add_argument("--venv", type=Path, help="where (default: .venv-ENGINE beside this project)")
    parser.add_argument("--python", default=sys.executable, help="which Python makes it (default: this one)")
    parser.add_argument("--check", action="store_true", help="import the engine at the end, which takes half a minute")
    asked = parser.parse_args(arguments)
    build = asked.build or ("cuda" if has_nvidia_gpu() else "cpu")
    venv = (asked.venv or ROOT / f".venv-{asked.engine}").absolute()
    try:
        install(asked.engine, build, venv, asked.python)
        if asked.check:
            check(asked.engine, venv)
    except InstallError as error:
        sys.exit(f"install_engine: {error}")


def install(engine: str, build: str, venv: Path, python: str) -> None:
    """Run all steps that are not finished.

    Raises:
        InstallError: a step failed.
    """
    began = time.monotonic()
    interpreter = describe(python)
    refuse_unfit(engine, build, interpreter)
    packages = REQUIREMENTS / (f"{engine}-cpu.txt" if build == "cpu" else f"{engine}.txt")
    with locked(venv):
        begin(venv, f"{build}\n{packages.read_text()}")
        is_new = False
        for name, content, act in (
            ("venv", "", lambda: make_venv(venv, interpreter, build)),
            ("packages", packages.read_text(), lambda: install_packages(venv, packages, build)),
            ("mtrl", f"{ROOT}\n{(ROOT / 'setup.py').read_text()}", lambda: install_mtrl(venv)),
        ):
            is_new |= step(venv, name, content, act)
    if is_new:
        seconds = time.monotonic() - began
        print(f"{engine} ({build}): {megabytes(venv):,} MB in {seconds:.0f} s, in {venv}")
    else:
        print(f"{engine} ({build}) is installed in {venv}")
    found_by_itself = venv == ROOT / f".venv-{engine}"
    setting = f"generator={engine}" + ("" if found_by_itself else f" generator.{engine}.python={venv}/bin/python")
    print(f"use it by: {setting}")
    if build == "cuda" and (advice := nccl_advice(engine, venv / "bin" / "python", ROOT / ".venv" / "bin" / "python")):
        print(advice)


# -- machine -------------------------------------------------------------------------------------------------------


def has_nvidia_gpu() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()


def describe(python: str) -> Interpreter:
    """Query a Python interpreter.

    Raises:
        InstallError: the interpreter does not run.
    """
    code = (
        "import json, platform, sys; name, version = platform.libc_ver(); "
        "print(json.dumps([sys.executable, sys.version_info[:2], version if name == 'glibc' else '0.0', "
        "platform.machine() if sys.platform == 'linux' else sys.platform]))"
    )
    try:
        done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise InstallError(f"--python {python} does not run ({error}); name a Python of 3.11 to 3.14") from None
    path, version, glibc, machine = json.loads(done.stdout)
    numbers = [int(part) for part in glibc.split(".")[:2]]
    return Interpreter(path, (version[0], version[1]), (numbers[0], numbers[1]), machine)


def refuse_unfit(engine: str, build: str, interpreter: Interpreter) -> None:
    """Check that the engine has wheels for this machine.

    Raises:
        InstallError: there are no wheels.
    """
    if not OLDEST <= interpreter.version <= NEWEST:
        found = ".".join(map(str, interpreter.version))
        raise InstallError(f"{engine} runs on Python 3.11 to 3.14 and {interpreter.path} is {found}; --python PATH")
    if interpreter.glibc < GLIBC[engine]:
        needed, found = (".".join(map(str, version)) for version in (GLIBC[engine], interpreter.glibc))
        has = f"has {found}" if interpreter.glibc > (0, 0) else "has another C library"
        raise InstallError(f"the wheels of {engine} need Linux with glibc {needed} and this machine {has}")
    if build == "cpu" and interpreter.machine != "x86_64":
        raise InstallError(f"there are no CPU wheels of {engine} for {interpreter.machine}, only for x86_64")


def nccl_advice(engine: str, engine_python: Path, trainer_python: Path) -> str:
    """Return what to install if the trainer has another NCCL than the engine; empty if they agree, or if one of them
    does not answer."""
    found = []
    for python in (engine_python, trainer_python):
        try:
            answer = subprocess.run([python, "-I", VERSIONS], capture_output=True, text=True, check=True)
        except (OSError, subprocess.SubprocessError):
            return ""
        found.append(json.loads(answer.stdout))
    theirs, ours = found
    if theirs["nccl"] == ours["nccl"]:
        return ""
    return (
        f"the trainer has NCCL {ours['nccl']} (torch {ours['torch']}) and {engine} {theirs['nccl']}, so they cannot "
        f"broadcast weights (weight_sync=distributed): TORCH=torch=={theirs['torch'].partition('+')[0]} "
        "scripts/install.sh installs the engine's PyTorch for the trainer"
    )


def megabytes(folder: Path) -> int:
    """Return the disk usage of a folder, in MB; files with several hard links are included."""
    sizes = (os.lstat(Path(base, name)).st_blocks for base, _, names in os.walk(folder) for name in names)
    return round(sum(sizes) * 512 / 1e6)


# -- steps ----------------------------------------------------------------------------------------------------------


def begin(venv: Path, content: str) -> None:
    """Empty the environment if it was started with another list of packages or build, or if its Python no longer
    exists."""
    begun = venv / STAMPS / "begun"
    is_other = begun.exists() and begun.read_text() != digest(content)
    if is_other or ((venv / STAMPS / "venv").exists() and not os.access(venv / "bin" / "python", os.X_OK)):
        why = "holds other packages" if is_other else "has no Python any more"
        print(f"{venv} {why}: it is made anew", flush=True)
        for entry in [*venv.iterdir(), *begun.parent.iterdir()]:
            if entry.name not in (STAMPS, LOCK):
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    write(begun, digest(content))


def step(venv: Path, name: str, content: str, act: Callable[[], None]) -> bool:
    """Run a step unless it is finished, and return whether it ran. Its stamp is written last, atomically."""
    stamp, done = venv / STAMPS / name, digest(content)
    if stamp.exists() and stamp.read_text() == done:
        return False
    act()
    write(stamp, done)
    return True


def make_venv(venv: Path, interpreter: Interpreter, build: str) -> None:
    """Create the virtual environment.

    Raises:
        InstallError: this Python cannot create one, or the disk has too little space.
    """
    free, needed = shutil.disk_usage(venv).free / 1e9, GIGABYTES[build]
    if free < needed:
        raise InstallError(f"{venv} needs {needed} GB of free disk and there are {free:.1f}; take another --venv")
    hint = "on Debian and Ubuntu: apt-get install python3-venv"
    call([interpreter.path, "-m", "venv", str(venv)], f"{interpreter.path} cannot make a virtual environment; {hint}")


def install_packages(venv: Path, packages: Path, build: str) -> None:
    """Install the packages with uv, which takes half the time, or with pip if uv is not available.

    Raises:
        InstallError: the installation failed.
    """
    python = str(venv / "bin" / "python")
    for half in half_installed(venv):
        shutil.rmtree(half)
    count = sum(1 for line in packages.read_text().splitlines() if line and not line.startswith("#"))
    size = f"about {GIGABYTES[build] - 1} GB, some minutes"
    print(f"installing {packages.relative_to(ROOT)} ({count} lines, {size}) into {venv}", flush=True)
    what = ["--no-deps", "-r", str(packages)]
    hint = (
        "; it is to be found by pip's settings, such as PIP_INDEX_URL, PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS, and "
        "PyTorch's CPU build (torch==…+cpu) is in the CPU index that pytorch.org names"
    )
    failed = f"the packages of {packages.name} could not be installed: look at the lines above{hint}"
    if (uv := uv_command(python)) is None:
        call([python, "-m", "pip", "install", "--quiet", *what], failed)
        return
    uv, settings = [*uv, "--compile-bytecode", *what], uv_settings(pip_settings(python))
    if (words := attempt(uv, settings)) is None:
        return
    # If pip's settings do not lead to PyTorch's CPU build, uv finds its index by name.
    if build == "cpu" and attempt([*uv, "--torch-backend", "cpu"], settings) is None:
        return
    raise InstallError(f"{tail(words)}\n{failed}")


def install_mtrl(venv: Path) -> None:
    """Install this checkout, so that servers run its code, without its requirements for training. The distribution
    `mtrl`, the name of an earlier version of this project, is removed, since its plugins no longer exist."""
    pip = [str(venv / "bin" / "python"), "-m", "pip"]
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--editable"]
    call([*pip, "uninstall", "--quiet", "--yes", "mtrl"], "an earlier mtrl cannot be removed there")
    call([*pip, "install", *options, str(ROOT)], "mtrl cannot be installed there")


def check(engine: str, venv: Path) -> None:
    """Import the engine and mtrl's plugin in the environment.

    Raises:
        InstallError: the engine cannot be imported, or does not find mtrl's plugin.
    """
    began = time.monotonic()
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LD_"))}
    program = [str(venv / "bin" / "python"), "-c", PLUGINS[engine] + SELF_CHECKS[engine]]
    if (words := attempt(program, clean)) is not None:
        raise InstallError(f"{tail(words)}\n{engine} in {venv} and cannot be used; remove it and install again")
    print(f"{engine} can be imported ({time.monotonic() - began:.0f} s)")


# -- how ------------------------------------------------------------------------------------------------------------


def half_installed(venv: Path) -> Iterator[Path]:
    """Yield records of packages whose installation was interrupted, which the installer would treat as installed."""
    for record in sorted(venv.glob("lib/python*/site-packages/*.dist-info")):
        if not (record / "INSTALLER").exists():
            yield record


def call(command: list[str], failed: str) -> None:
    """Run a command.

    Raises:
        InstallError: the command failed; the message holds its last lines and then `failed`.
    """
    if (words := attempt(command)) is not None:
        raise InstallError(f"{tail(words)}\n{failed}")


def tail(words: str) -> str:
    """Return the end of an installer's output, without pip's warnings about folders."""
    lines = [line for line in words.splitlines() if line.strip() and not line.startswith("WARNING: Location")]
    return "\n".join(lines[-SHOWN:])


def write(path: Path, text: str) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def locked(venv: Path) -> Iterator[None]:
    """Lock the environment during an installation; a concurrent installation waits, and then finds it finished.

    Raises:
        InstallError: the folder holds other files, or cannot be written.
    """
    if venv.exists() and any(venv.iterdir()) and not (venv / STAMPS).exists():
        raise InstallError(f"{venv} is there and was not made by this script; remove it, or take another --venv")
    try:
        (venv / STAMPS).mkdir(parents=True, exist_ok=True)
        file = (venv / STAMPS / LOCK).open("w")
    except OSError as error:
        raise InstallError(f"{venv} cannot be written ({error.strerror}); take another --venv") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another install into {venv} is on its way: waiting for it", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    main()
