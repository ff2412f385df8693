"""The memory of this machine, as its kernel reports it, and the version of its driver."""

import pytest

from mtrl.doctor.machine import driver_cuda, memory

GIB = 2**30
MEMINFO = "MemTotal: 67108864 kB\nMemFree: 1 kB\nMemAvailable: 52428800 kB\nHugePages_Total: 0\n"
"""64 GiB, of which 50 are available."""


def tree(root, cgroup, files):
    """Write the kernel's files, and return the memory that they describe, in GiB."""
    for name, text in {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return tuple(size / GIB for size in memory(root))


def limited(folder, limit, used, dropped):
    """Return the files of a cgroup of version 2; sizes in GiB."""
    sizes = {"memory.max": limit * GIB, "memory.current": used * GIB}
    return {
        **{f"sys/fs/cgroup{folder}/{name}": f"{size}\n" for name, size in sizes.items()},
        f"sys/fs/cgroup{folder}/memory.stat": f"anon 5\ninactive_file {dropped * GIB}\n",
    }


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {}, (64, 50)),
        ("0::/\n", {"sys/fs/cgroup/memory.max": "max\n"}, (64, 50)),
        ("0::/\n", limited("", 16, 12, 1), (16, 5)),  # a container
        ("0::/\n", limited("", 100, 1, 0), (64, 50)),
        ("0::/job_7/step_0\n", limited("/job_7", 32, 8, 0) | limited("/job_7/step_0", 40, 2, 0), (32, 24)),  # SLURM
        ("0::/a\n", limited("/a", 8, 9, 0), (8, 0)),
        (
            "5:cpu:/x\n4:memory:/job\n",
            {
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(8 * GIB),
                "sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(3 * GIB),
                "sys/fs/cgroup/memory/job/memory.stat": f"total_inactive_file {GIB}",
            },
            (8, 6),
        ),
    ],
)
def test_free_memory_is_what_the_container_and_the_job_leave(tmp_path, cgroup, files, expected):
    assert tree(tmp_path, cgroup, files) == expected


def test_a_machine_without_these_files_has_unknown_memory(tmp_path):
    assert memory(tmp_path) is None


@pytest.mark.parametrize(
    ("header", "version"),
    [
        ("| NVIDIA-SMI 560.35.03    Driver Version: 560.35.03    CUDA Version: 12.6     |", "12.6"),
        ("| NVIDIA-SMI 610.43.02    KMD Version: 610.43.02    CUDA UMD Version: 13.3     |", "13.3"),
        ("No devices were found", None),
    ],
)
def test_the_header_of_every_driver_has_its_cuda_version(header, version, tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{header}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert driver_cuda() == version
