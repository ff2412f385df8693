"""A container of Podman or Docker, by their command-line programs."""

from __future__ import annotations

import logging
import math
import os
import resource
import shutil
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from mtrl.errors import UserError
from mtrl.sandbox.bounded_client import SLACK_SECONDS, run_bounded, run_client
from mtrl.sandbox.container import CommandResult, ContainerError, ContainerLimits, ContainerRemovedError
from mtrl.sandbox.container_files import ContainerFiles, container_files, may_measure
from mtrl.sandbox.container_supervisor import owner_label
from mtrl.sandbox.disk_watch import WatchedContainer, disk_watch

log = logging.getLogger(__name__)

START_SECONDS = 1200
"""Time limit for the start of a container, which may pull its image, in seconds."""
CLIENT_SECONDS = 300
"""Time limit of other calls of the program, in seconds; a busy machine can need many."""
CALLS_AT_ONCE = 8
"""Maximum number of concurrent calls that start, fill or remove a container. Each call is a process of some 50 MB that
waits for locks of the engine, so hundreds of them delay each other by minutes."""
_slots = threading.BoundedSemaphore(CALLS_AT_ONCE)
USER_LIMITS = (("nofile", resource.RLIMIT_NOFILE, 2**14), ("nproc", resource.RLIMIT_NPROC, 2**15))
"""Name, kind and wanted value of the limits of a user in a container. The kernel counts the processes of a user in all
containers together, so their limit is far above that of one container."""
WAIT = 'trap "" INT; exec 3<> <(:); sleep $1 & wait $!; until ((SECONDS >= $1)); do read -rn 1 -t 0.1 -u 3; done'
"""Main process of a container, which ends after $1 seconds. It is bash, which removes ended processes whose parent has
ended: otherwise they would count as processes until the end. A command that kills the sleep does not end it: it then
reads from a pipe into which it writes nothing, because at the limit on processes no second sleep could start. A read
without a time limit would not end, and bash removes ended processes only after a read that has one."""
_FAILURES = (125, 126, 255)
"""Exit codes of docker and podman for errors of their own, such as 255 if Docker's daemon ends during a command.
Commands use the same codes, so the container is checked."""
_FAILURE_WORDS = ("error", "cannot connect", "failed to connect")
"""Beginnings of their output, in lower case, if the exit code is 1, which too many commands use for a check of each."""

RUN_WORDS = ("bash", "--posix", "-c", '{ echo 1000 > /proc/self/oom_score_adj; } 2> /dev/null; exec "$@" 2>&1', "bash")
"""Program that runs its arguments as a program. The standard error of that program is its standard output, since an
engine transports two streams and the order of their lines gets lost. If memory runs out, the kernel kills the processes
of the program before the main process, whose end would end the container. This bash is POSIX's, which does not read the
file that BASH_ENV names."""
_LARGEST_COMMAND = 2**17 - 1
"""Maximum length of one argument of a program, in bytes (MAX_ARG_STRLEN of Linux without the last byte)."""
_HOST_NAME = "container"
"""Host name of every container, so that commands print the same in each episode."""
_BEING_REMOVED = "is already in progress"
"""Text of Docker's error for the removal of a container whose removal has begun, because it has ended."""
PAUSE = 0.1
"""Seconds between two attempts to remove such a container."""


class EngineContainer:
    """A container that runs nothing but `WAIT`, and the commands that `run` adds to it.

    Args:
        engine: name of the program: docker or podman.
        image: name of the image, which is pulled if it is missing.
        cwd: working directory of the commands; None: that of the image.
    """

    def __init__(self, engine: str, image: str, limits: ContainerLimits, cwd: str | None = None):
        self.engine, self.image, self.limits, self.cwd = engine, image, limits, cwd
        self.name = f"mtrl-{uuid.uuid4().hex}"
        self._program = engine_path(engine)
        self._disk_is_full = threading.Event()

    def start(self) -> None:
        """See `Container.start`."""
        what = f"{self.engine} cannot start a container of {self.image}"
        # Podman's monitor of the container writes a file `oom` into its working directory if memory runs out.
        with tempfile.TemporaryDirectory(prefix="mtrl-") as folder:
            call_engine(self._start_command(), START_SECONDS, what, folder)
        if self.limits.disk_mb is not None:
            watched = WatchedContainer(self.limits.disk_mb * 2**20, self.files(), self._stop_for_disk)
            disk_watch(self._program).add(self.name, watched)

    def run(
        self, command: str, seconds: float, env: Mapping[str, str] | None = None, stdin: bytes | None = None
    ) -> CommandResult:
        """See `Container.run`. `timeout` kills the command and its process group inside the container; if that fails,
        the client is killed. A container that has exceeded its limit of the disk is removed, and runs no command.

        Args:
            stdin: standard input of the command; None: empty.
        """
        if self._disk_is_full.is_set():
            return CommandResult("", -1, self._disk_reason())
        if problem := problem_of(command):
            return CommandResult(f"{problem}\n", 126)
        client = [self._program, "exec", *(["-i"] if stdin is not None else [])]
        client += ["-w", self.cwd] if self.cwd else []
        client += [word for name, value in (env or {}).items() for word in ("-e", f"{name}={value}")]
        inside = [*RUN_WORDS, "timeout", "-s", "KILL", f"{seconds:g}", "bash", "-c", command]
        begun = time.monotonic()
        done = run_bounded([*client, self.name, *inside], seconds, stdin)
        was_late = time.monotonic() - begun >= seconds
        if self._disk_is_full.is_set():
            return CommandResult(done.output, -1, self._disk_reason())
        says_so = done.output[:100].lower().startswith(_FAILURE_WORDS)
        # A daemon that SIGTERM stops kills the containers: the command is killed, and not because of its time limit.
        was_killed = bool(done.stopped) and not was_late
        may_have_failed = done.exit_code in _FAILURES or was_killed or (done.exit_code == 1 and says_so)
        if may_have_failed and not self.is_running():
            reason = reason_of(done.output) if says_so else f"the container has ended, or {self.engine} is lost"
            raise ContainerError(f"{self.engine} cannot run a command in {self.image}: {reason}")
        return done

    def copy_in(self, source: Path, target: str) -> None:
        """See `Container.copy_in`."""
        what = f"{self.engine} cannot copy {source.name} to {target}"
        try:
            call_engine([self._program, "cp", f"{source}/.", f"{self.name}:{target}"], CLIENT_SECONDS, what)
        except ContainerError as error:
            if self._disk_is_full.is_set():
                raise ContainerRemovedError(self._disk_reason()) from error
            raise

    def write(self, path: str, text: str) -> None:
        """Write a file in the container.

        Raises:
            ContainerError: the file cannot be written.
        """
        done = self.run(f"cat > {path}", SLACK_SECONDS, stdin=text.encode("utf-8", "replace"))
        if done.exit_code != 0:
            raise ContainerError(f"{self.engine} cannot write {path}: {_last_line(done.output)}")

    def remove(self) -> None:
        """See `Container.remove`."""
        with _slots:
            if self._delete():
                disk_watch(self._program).discard(self.name)

    def _delete(self) -> bool:
        """Remove the container, and return whether it is gone."""
        deadline = time.monotonic() + CLIENT_SECONDS
        problem = self._problem_of_removal()
        while _BEING_REMOVED in problem and time.monotonic() < deadline:
            time.sleep(PAUSE)
            problem = self._problem_of_removal()
        if problem:
            log.warning(
                "%s did not remove the container %s (%s); its supervisor removes it after the run",
                self.engine,
                self.name,
                problem,
            )
        return not problem

    def _problem_of_removal(self) -> str:
        """Ask the engine to remove the container, and return why it did not; empty if the container is gone."""
        try:
            done = run_client([self._program, "rm", "-f", self.name], CLIENT_SECONDS)
        except subprocess.TimeoutExpired:
            return f"it took longer than {CLIENT_SECONDS} s"
        is_gone = done.returncode == 0 or "no such container" in done.stderr.lower()
        return "" if is_gone else reason_of(done.stderr)

    def _start_command(self) -> list[str]:
        command = [self._program, "run", "-d", "--name", self.name, "--label", owner_label(self._program)]
        command += ["--hostname", _HOST_NAME, *_limit_words(self.limits)]
        command += ["--stop-signal", "KILL", "--entrypoint", "bash"]
        command += ["-w", self.cwd] if self.cwd else []
        return [*command, self.image, "-c", WAIT, "bash", str(math.ceil(self.limits.seconds))]

    def files(self) -> ContainerFiles | None:
        """Return where the files of the container are on this machine; None if they can be measured by the engine
        alone."""
        if not may_measure():
            return None
        container, _, process = self._inspect("{{.Id}} {{.State.Pid}}").partition(" ")
        return container_files(int(process), container) if process.isdecimal() else None

    def _stop_for_disk(self) -> bool:
        """End the container, whose files are too large, and delete them, without waiting for other calls. Return
        whether it is gone."""
        self._disk_is_full.set()
        return self._delete()

    def _disk_reason(self) -> str:
        return f"the files of the container exceeded {self.limits.disk_mb} MiB, and the container was removed"

    def is_running(self) -> bool:
        """Return whether the engine says that the container is running."""
        return self._inspect("{{.State.Running}}") == "true"

    def _inspect(self, template: str) -> str:
        """Return what the engine says of the container, in the form of a template of Go; empty if it says nothing
        in time."""
        try:
            command = [self._program, "container", "inspect", "--format", template, self.name]
            return run_client(command, CLIENT_SECONDS).stdout.strip()
        except subprocess.TimeoutExpired:
            return ""


def problem_of(command: str) -> str:
    """Return why a text, which a model may have written, cannot be an argument of a program; empty if it can."""
    if "\0" in command:
        return "bash: the command has a NUL character, which no command may have"
    try:
        size = len(command.encode())
    except UnicodeEncodeError:
        return "bash: the command has a lone surrogate, which is no character of UTF-8"
    if size > _LARGEST_COMMAND:
        return f"bash: the command has {size} bytes, and may have {_LARGEST_COMMAND}"
    return ""


def engine_path(engine: str) -> str:
    """Return the path of the program of a container engine.

    Raises:
        UserError: the program is not installed.
    """
    path = shutil.which(engine)
    if path is None:
        raise UserError(
            f"environment.config.backend={engine} needs the program {engine}, which is not on PATH; install {engine}, "
            "or set another backend"
        )
    return os.path.abspath(path)


def call_engine(command: list[str], seconds: float, what: str, cwd: str | None = None) -> str:
    """Run a container program to its end, and return its standard output.

    Args:
        seconds: time limit in seconds, after which the client is killed.
        what: beginning of the message of an error.
        cwd: working directory of the program; None: that of this process.

    Raises:
        ContainerError: the program failed, cannot be run, or took too long.
    """
    try:
        with _slots:
            done = run_client(command, seconds, cwd)
    except subprocess.TimeoutExpired as error:
        raise ContainerError(f"{what}: it took longer than {seconds:g} s") from error
    except OSError as error:
        raise ContainerError(f"{what}: {error.strerror}") from error
    if done.returncode != 0:
        raise ContainerError(f"{what}: {reason_of(done.stderr or done.stdout)}")
    return done.stdout


def user_limits() -> list[str]:
    """Return the limits on open files and processes of a user in a container, as arguments of a container engine. They
    are set because an engine without the capability to raise limits cannot set its own defaults of 1,048,576."""
    return [word for limit in USER_LIMITS for word in _limit_word(*limit)]


def _limit_words(limits: ContainerLimits) -> list[str]:
    words = ["--rm", *([] if limits.network else ["--network", "none"])]
    words += ["--memory", limits.memory, "--memory-swap", limits.memory, "--pids-limit", str(limits.processes)]
    words += ["--cpus", f"{limits.cpus:g}"] if limits.cpus is not None else []
    words += [] if limits.disk_mb is None else _limit_word("fsize", resource.RLIMIT_FSIZE, limits.disk_mb * 2**20)
    return [*words, "--security-opt", "no-new-privileges", *user_limits()]


def _limit_word(name: str, kind: int, wanted: int) -> list[str]:
    """Return a limit of a user as arguments of a container engine, not above that of this process."""
    most = resource.getrlimit(kind)[1]
    count = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
    return ["--ulimit", f"{name}={count}:{count}"]


def reason_of(printed: str) -> str:
    """Return the reason that an engine printed for a failure: the last line that begins like one, else the last line.
    Docker's client 28 prints a hint to its help after the reason."""
    reasons = [line for line in printed.splitlines() if line.startswith(("docker:", "Error", "ERROR"))]
    return _last_line(reasons[-1] if reasons else printed)


def _last_line(output: str) -> str:
    lines = output.strip().splitlines()
    return lines[-1][:500] if lines else "the program printed nothing"


def _renew_slots() -> None:
    """Free all slots in a process that was forked, since the parent's threads that held some do not run there."""
    global _slots
    _slots = threading.BoundedSemaphore(CALLS_AT_ONCE)


os.register_at_fork(after_in_child=_renew_slots)
