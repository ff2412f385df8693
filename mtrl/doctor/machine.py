"""Properties of the machine: PyTorch, driver, cores, memory, folders. Every call of a program has a time limit."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SECONDS = 60.0
"""Default time limit for a program to answer, in seconds."""
CGROUPS = {
    1: ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
}
"""Each entry belongs to a version of cgroups. It has the folder of the outermost cgroup, the names of the files with a
cgroup's limit and use, and the name in `memory.stat` of the pages of files that the kernel can drop."""
_ASK_TORCH = """
import json, torch
gpus = []
if torch.cuda.is_available():
    for n in range(torch.cuda.device_count()):
        seen = torch.cuda.get_device_properties(n)
        gpus.append([seen.name, seen.total_memory])
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip, "gpus": gpus}))
"""


@dataclass(frozen=True)
class Torch:
    """The report of PyTorch, made in a process of its own because a broken driver can hang or end the process that
    queries it."""

    version: str
    cuda: str | None
    """CUDA or HIP version that PyTorch was built for; None for a CPU build."""
    gpus: tuple[tuple[str, int], ...]
    """Name and memory, in bytes, of each GPU that PyTorch can use."""


@cache
def ask_torch(seconds: float = SECONDS) -> Torch:
    """Query PyTorch in a process of its own.

    Raises:
        RuntimeError: PyTorch cannot be imported, or does not answer.
    """
    output = answer([sys.executable, "-c", _ASK_TORCH], seconds)
    found = json.loads(output.splitlines()[-1])
    return Torch(found["version"], found["cuda"] or found["hip"], tuple((name, size) for name, size in found["gpus"]))


def answer(command: list[str], seconds: float = SECONDS) -> str:
    """Run a program, and return its standard output.

    Raises:
        RuntimeError: the program cannot be started, fails, or does not end in time.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{Path(command[0]).name} did not answer within {seconds:g} seconds") from None
    except OSError as error:
        raise RuntimeError(f"{Path(command[0]).name} cannot be started ({error.strerror})") from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise RuntimeError(last)
    return done.stdout


def driver_cuda() -> str | None:
    """Return the newest CUDA version that the NVIDIA driver supports, from the header of `nvidia-smi`; None without a
    driver.

    Newer drivers name it `CUDA UMD Version`, that of the user-mode driver, where older ones name it `CUDA Version`.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    found = re.search(r"CUDA (?:UMD )?Version:\s*(\d+\.\d+)", answer([program], 20.0))
    return found[1] if found else None


def cuda_fits(built: str, driver: str) -> bool:
    """Whether a driver supports a build for a CUDA version: that of the same major version or an older one (CUDA's
    minor version compatibility)."""
    return int(built.split(".")[0]) <= int(driver.split(".")[0])


def memory(root: Path = Path("/")) -> tuple[int, int] | None:
    """Return the total and the free bytes of main memory, bounded by the limits of this process's containers and jobs;
    None if unknown.

    Args:
        root: folder that holds `proc` and `sys`.
    """
    try:
        sizes = _fields(root / "proc/meminfo", 1024)
    except OSError:
        return None
    found = [(sizes["MemTotal"], sizes.get("MemAvailable", sizes["MemFree"])), *_limits(root)]
    return min(whole for whole, _ in found), max(0, min(free for _, free in found))


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit of each cgroup of this process that has one, and the bytes of it that are free. Pages of files
    that the kernel can drop are free."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="ascii").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            top, limit, used, dropped = CGROUPS[1 if controllers else 2]
            own = root / top / path.lstrip("/")
            for folder in (own, *own.parents):
                # A limit that is no number is none, and the outermost cgroup of a machine has no files.
                with suppress(OSError, ValueError):
                    size = int((folder / limit).read_text(encoding="ascii"))
                    taken = int((folder / used).read_text(encoding="ascii"))
                    yield size, size - taken + _fields(folder / "memory.stat").get(dropped, 0)


def _fields(path: Path, unit: int = 1) -> dict[str, int]:
    """Return the numbers of a file with lines such as `name 123` or `name: 123 kB`, by name."""
    lines = (line.replace(":", " ").split() for line in path.read_text(encoding="ascii").splitlines())
    return {name: int(value) * unit for name, value, *_ in lines}


def existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())
