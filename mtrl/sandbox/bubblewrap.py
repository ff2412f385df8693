"""Bubblewrap: the file system of a sandbox, and the command line that runs a command in it.

There are two layers. One mount namespace per sandbox holds the system, read-only, and a tmpfs for all files that the
episode writes: the kernel itself then limits the number and size of the files, and frees them when the last descriptor
is closed, even after SIGKILL. Inside it, each command gets its own namespaces, so that all its processes end with it.

Commands never run as the root of the host, even if mtrl does: the kernel does not count the processes of root
(`RLIMIT_NPROC`, kernel/fork.c), and it counts those of other users per user namespace since Linux 5.14.
"""

from __future__ import annotations

import os
import select
import shutil
import stat
import subprocess
import sys
import sysconfig
import weakref
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from mtrl.errors import UserError
from mtrl.sandbox.limits import ProcessLimits, SandboxError

NOBODY = 65534
"""User and group id of commands on the host, if mtrl runs as root."""
_INSIDE = "1000"
"""User and group id of commands inside the sandbox."""
OWN_PYTHON = "/opt/python"
"""Folder inside the sandbox of the Python that runs mtrl, unless it is one of the system."""
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Search path of the programs: folders that also exist in the mount namespace, where most of the programs are run."""
_START_SECONDS = 60
PACKAGES = {"bwrap": "bubblewrap", "nsenter": "util-linux", "setpriv": "util-linux", "mount": "mount", "bash": "bash"}
"""Program that the sandbox needs -> package of Debian that contains it."""
_ENVIRONMENT = {
    "PATH": f"{OWN_PYTHON}/bin:/usr/local/bin:/usr/bin:/bin",
    "HOME": "/workspace",
    "USER": "sandbox",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "TERM": "dumb",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
}
_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d")

_MAKE_FOLDERS = r"""
set -e
mkdir /data
mount -t tmpfs -o "size=$1,nr_inodes=$2,mode=0755,nosuid,nodev" tmpfs /data
mkdir -m 700 /data/workspace /data/tmp /data/shm
[ "$3" = 0 ] || chown "$3:$3" /data/workspace /data/tmp /data/shm
for folder in "${@:4}"; do
  mkdir -m 755 "/data/$folder"
  [ "$3" = 0 ] || chown "$3:$3" "/data/$folder"
done
printf 'root:x:0:0::/:/bin/false\nsandbox:x:1000:1000::/workspace:/bin/bash\n' > /etc/passwd
printf 'root:x:0:\nsandbox:x:1000:\n' > /etc/group
printf 'passwd: files\ngroup: files\nhosts: files\n' > /etc/nsswitch.conf
printf '127.0.0.1 localhost sandbox\n' > /etc/hosts
echo $$
read -r
"""
"""Script that runs once per sandbox, before any hostile command. `read` keeps the namespace alive until mtrl holds
descriptors of it."""

_RUN_LIMITED = r"""
ulimit -c 0 -l 0 -q 0 -t "$1" -v "$2" -u "$3" -n "$4" -f "$5"
echo 1000 > /proc/self/oom_score_adj
shift 5
exec 3>&2 2>/dev/null
"$@" 2>&3 3>&-
exit $?
"""
"""Script of the first process of each command. The command does not replace it, because the kernel shields process 1
from signals, and a command without signals would behave differently. The script's own stderr is closed, because the
shell would report signals there."""


@lru_cache(maxsize=1)
def find_programs() -> dict[str, str]:
    """Return the paths of the programs that the sandbox needs.

    Raises:
        UserError: this is not Linux, or a program is not installed; the message names the packages.
    """
    if not sys.platform.startswith("linux"):
        raise UserError(f"the process sandbox needs Linux namespaces, which {sys.platform} lacks; use Linux, or a VM")
    paths = {name: shutil.which(name, path=SYSTEM_PATH) for name in PACKAGES}
    if missing := [name for name, path in paths.items() if path is None]:
        packages = " ".join(sorted({PACKAGES[name] for name in missing}))
        raise UserError(
            f"the process sandbox needs {', '.join(missing)}, and commands never run without it; install it with: "
            f"apt-get install {packages} (or the same package of your system){_elsewhere(missing)}"
        )
    return {name: path for name, path in paths.items() if path}


def _elsewhere(missing: list[str]) -> str:
    """Return a hint about the programs in `missing` that are on the PATH, but in folders unknown to the sandbox."""
    found = [path for name in missing if (path := shutil.which(name, path=os.environ.get("PATH", "")))]
    return f"; {', '.join(found)} cannot be taken, for the sandbox sees programs of the system only" if found else ""


class Namespace:
    """The mount namespace of one sandbox. Only descriptors keep it alive; it has no process and no folder on the host.

    `folder` is a descriptor of its /workspace. `folders` names further writable folders of the root, such as `app`.

    Raises:
        UserError: a program is missing, or the system forbids the namespaces.
        SandboxError: the host has no descriptors or processes left.
    """

    def __init__(self, limits: ProcessLimits, folders: Sequence[str] = ()):
        self.owner = NOBODY if os.geteuid() == 0 else 0
        self.folders = tuple(folders)
        try:
            self._open([*_base(limits, self.owner), *self.folders])
        except OSError as error:
            raise SandboxError(f"the sandbox cannot be made: {error}") from error
        self.close = weakref.finalize(self, _close, self._mounts, self._users, self.folder)

    def _open(self, command: list[str]) -> None:
        pipe = subprocess.PIPE
        holder = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env={}, start_new_session=True)
        try:
            process = os.open(f"/proc/{_read_pid(holder)}", os.O_RDONLY | os.O_DIRECTORY)
            opened: list[int] = []
            try:
                for name in ("ns/mnt", "ns/user", "root/data/workspace"):
                    opened.append(os.open(name, os.O_RDONLY, dir_fd=process))
            except OSError:
                _close(*opened)
                raise
            finally:
                os.close(process)
            self._mounts, self._users, self.folder = opened
        finally:
            holder.communicate()  # closes its stdin, on which the process waits

    def make_enterable(self) -> None:
        """Give the owner of /workspace all rights to it, which an earlier command may have taken away: no command could
        start there, and only root could read its files.

        Raises:
            SandboxError: the rights cannot be changed.
        """
        try:
            mode = stat.S_IMODE(os.fstat(self.folder).st_mode)
            if mode & stat.S_IRWXU != stat.S_IRWXU:
                os.fchmod(self.folder, mode | stat.S_IRWXU)
        except OSError as error:
            raise SandboxError(f"the folder of the sandbox cannot be opened: {error}") from error

    def command_line(self, command: list[str], limits: ProcessLimits, status: int, seccomp: int) -> list[str]:
        """Return the host's command that runs `command` inside the sandbox. bwrap inherits the descriptors `status` and
        `seccomp`."""
        programs = find_programs()
        own = f"/proc/{os.getpid()}/fd"
        if self.owner:
            become = f"--reuid={self.owner} --regid={self.owner} --clear-groups --no-new-privs"
            enter = [programs["nsenter"], f"--mount={own}/{self._mounts}", "--", programs["setpriv"], *become.split()]
        else:
            users = ["--preserve-credentials", f"--user={own}/{self._users}"]
            enter = [programs["nsenter"], *users, f"--mount={own}/{self._mounts}", "--"]
        inner = _inner(status, seccomp, self.folders)
        return [*enter, programs["bwrap"], *inner, "--", *_limited(command, limits)]


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _system() -> list[str]:
    """Return bubblewrap's arguments for the part of the host that is visible inside: programs and libraries."""
    arguments = ["--ro-bind", "/usr", "/usr"]
    for path in map(Path, ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")):
        if path.is_symlink():
            arguments += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            arguments += ["--ro-bind", str(path), str(path)]
    return arguments


def _own_prefix() -> Path | None:
    """Return the folder on the host of the Python that is at /opt/python inside; None if it is one of the system."""
    prefix = Path(sys.base_prefix).resolve()
    return None if prefix.is_relative_to("/usr") else prefix


@lru_cache(maxsize=1)
def _library_path() -> dict[str, str]:
    """Return the variable by which the program in /opt/python finds its shared library, if it has one. The program
    names the folder of the library on the host, which does not exist inside, so it would take a library of the system
    that has the same name and may be of another version."""
    library = sysconfig.get_config_var("INSTSONAME") if sysconfig.get_config_var("Py_ENABLE_SHARED") else None
    prefix = _own_prefix()
    if library is None or prefix is None or not (prefix / "lib" / library).is_file():
        return {}
    return {"LD_LIBRARY_PATH": f"{OWN_PYTHON}/lib"}


def _base(limits: ProcessLimits, owner: int) -> list[str]:
    """Return the command that makes the mount namespace of a sandbox."""
    programs = find_programs()
    arguments = [programs["bwrap"], "--new-session", "--die-with-parent", "--cap-drop", "ALL"]
    arguments += ["--cap-add", "CAP_SYS_ADMIN"]
    arguments += ["--cap-add", "CAP_CHOWN"] if owner else ["--unshare-user", "--uid", "0", "--gid", "0"]
    arguments += [*_system(), "--perms", "0755", "--dir", "/etc", "--perms", "0755", "--dir", "/opt"]
    for name in _ETC:
        arguments += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    if (prefix := _own_prefix()) is not None:
        arguments += ["--ro-bind", str(prefix), OWN_PYTHON]
    # bwrap itself needs /tmp, and /proc: the kernel mounts another one only if a complete one is visible.
    arguments += ["--perms", "1777", "--dir", "/tmp", "--bind", "/proc", "/proc", "--dev", "/dev", "--chdir", "/"]
    arguments += ["--setenv", "PATH", "/usr/sbin:/usr/bin:/sbin:/bin", "--", programs["bash"], "-c", _MAKE_FOLDERS]
    return [*arguments, "bash", str(limits.workspace_bytes), str(limits.workspace_files), str(owner)]


def _inner(status: int, seccomp: int, folders: Sequence[str]) -> list[str]:
    """Return bubblewrap's arguments for one command. `--unshare-all` would silently skip unavailable namespaces."""
    arguments = [f"--unshare-{kind}" for kind in ("user", "ipc", "pid", "net", "uts", "cgroup-try")]
    arguments += ["--as-pid-1", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    arguments += ["--uid", _INSIDE, "--gid", _INSIDE, "--hostname", "sandbox", "--clearenv"]
    for name, value in (_ENVIRONMENT | _library_path()).items():
        arguments += ["--setenv", name, value]
    arguments += [*_system(), "--ro-bind", "/etc", "/etc", "--ro-bind", "/opt", "/opt", "--proc", "/proc"]
    # The command could write the settings of its own namespaces, and some of them occupy kernel memory.
    arguments += ["--ro-bind", "/proc/sys", "/proc/sys", "--ro-bind-try", "/proc/pressure", "/proc/pressure"]
    # /dev/full can be read like /dev/zero, and cannot be mapped: no limit counts shared mappings of /dev/zero.
    arguments += ["--dev", "/dev", "--dev-bind", "/dev/full", "/dev/zero", "--bind", "/data/shm", "/dev/shm"]
    arguments += ["--bind", "/data/workspace", "/workspace", "--bind", "/data/tmp", "/tmp"]
    for folder in folders:
        arguments += ["--bind", f"/data/{folder}", f"/{folder}"]
    # Each of the two is a tmpfs without its own size limit.
    arguments += ["--remount-ro", "/dev", "--remount-ro", "/"]
    return [*arguments, "--chdir", "/workspace", "--json-status-fd", str(status), "--seccomp", str(seccomp)]


def _limited(command: list[str], limits: ProcessLimits) -> list[str]:
    """Return the command with its limits. `ulimit` counts memory and files in units of 1024 bytes."""
    values = (limits.cpu_seconds, limits.memory_bytes // 1024, limits.processes, limits.open_files)
    return ["/bin/bash", "-c", _RUN_LIMITED, "bash", *map(str, values), str(limits.file_bytes // 1024), *command]


def _read_pid(holder: subprocess.Popen[bytes]) -> int:
    """Return the process id that the holder of a new namespace prints once it is ready."""
    assert holder.stdout is not None and holder.stderr is not None
    poll = select.poll()
    poll.register(holder.stdout, select.POLLIN)
    line = holder.stdout.readline() if poll.poll(1000 * _START_SECONDS) else b""
    if line.strip().isdigit():
        return int(line)
    holder.kill()
    raise UserError(forbidden(holder.stderr.read().decode(errors="replace")))


def forbidden(output: str) -> str:
    """Return the error message for a system on which bubblewrap cannot isolate; `output` is that of bubblewrap."""
    output = " ".join(output.split())[:300] or "it printed nothing"
    for name, wrong, right in (
        ("user/max_user_namespaces", "0", "10000"),
        ("kernel/unprivileged_userns_clone", "0", "1"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "0"),
    ):
        setting = Path("/proc/sys", name)
        if setting.exists() and setting.read_text().strip() == wrong:
            fix = f"permit user namespaces with: sysctl -w {name.replace('/', '.')}={right}"
            break
    else:
        fix = (
            "in a container, start it with: --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
            "--security-opt systempaths=unconfined --cap-add SYS_ADMIN"
        )
    return f"bubblewrap cannot isolate commands here ({output}), and they never run without; {fix}"
