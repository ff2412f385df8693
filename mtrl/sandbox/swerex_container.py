"""A remote container that runs a server of SWE-ReX (`swerex-remote`), for one episode."""

from __future__ import annotations

import io
import json
import logging
import tarfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from mtrl.errors import UserError
from mtrl.sandbox import bounded_command
from mtrl.sandbox.container import CommandResult, ContainerError, CopyRefusedError
from mtrl.sandbox.server_lease import ServerLease, lease
from mtrl.sandbox.swerex_client import SweRexClient, TokenRefusedError

log = logging.getLogger(__name__)

WAIT_SECONDS = 600.0
"""Maximum number of seconds until a server is free and fresh."""
PAUSE = 0.5
"""Seconds between two looks at the servers."""
LOOK_PAUSE = 0.05
"""Seconds between two looks at a server that ends; a fresh one needs longer to start."""
CALL_SECONDS = 60.0
"""Time limit of a request, in seconds; for a command in addition to its own limit."""
OUTPUT_BYTES = 2**20
"""Maximum output of a command, in bytes. A command with more output is killed."""
STOPPED_CHARACTERS = 200
"""Maximum length of the reason why a command was stopped, in characters."""
END_SECONDS = 10.0
"""Maximum number of seconds until a server that was told to end has ended."""
_END = "(kill -TERM $PPID; sleep 5; kill -KILL $PPID)"
"""Ends the server, which is the parent of the shell. The first process of a container ignores the second signal."""
_IN_BACKGROUND = "< /dev/null > /dev/null 2>&1 &"
_CLAIM = f"""
[ -d /tmp/.mtrl-episode ] || mkdir -p -- "$2" || exit
mkdir /tmp/.mtrl-episode 2> /dev/null || {{ echo "used by $(cat /tmp/.mtrl-episode/owner)"; exit; }}
echo "$3" > /tmp/.mtrl-episode/owner
(sleep "$1"; {_END}) {_IN_BACKGROUND}
readlink -f /proc/$PPID/exe
"""
"""Makes the folder $2, marks the container as used by $3, ends it after $1 seconds, and prints the path of the Python
that runs the server."""
_END_WITHOUT_BASH = "import os; os.kill(os.getppid(), 15)"
"""Python that ends the server, for a container whose bash the agent has removed."""
_ALL_USED = "other episodes use all of them; name more servers"
_UNPACK = 'exec 2>&1; tar -x -o -f "$1" -C "$2"; code=$?; rm -f "$1"; exit $code'
_ARCHIVE = "/tmp/.mtrl-archive.tar"


class SweRexContainer:
    """A container behind one of several servers. A server serves one episode at a time; after the episode it is told to
    end, so that its container ends too, and whatever started the container starts a fresh one.

    Args:
        servers: addresses of the servers, http://127.0.0.1:PORT or https://HOST:PORT.
        cwd: working directory of the commands, which is made.
        seconds: wall time in seconds after which the server ends by itself, whatever happens to this process.
    """

    def __init__(self, servers: Sequence[str], cwd: str, seconds: float):
        self.servers, self.cwd, self.seconds = tuple(servers), cwd, seconds
        self._lease: ServerLease | None = None
        self._client: SweRexClient | None = None
        self._python = ""
        self._lock = threading.Lock()
        self._is_removed = False

    def start(self) -> None:
        """Take a server that is free, and whose container served no episode before.

        Raises:
            ContainerError: no server was free and fresh within `WAIT_SECONDS`; the message has the reason.
            UserError: a server refuses the token, or an address is invalid.
        """
        deadline, waiting, unfit = time.monotonic() + WAIT_SECONDS, _ALL_USED, ""
        while time.monotonic() < deadline and not self._is_removed:
            for url in self.servers:
                try:
                    if self.take(url):
                        return
                except UnfitError as error:
                    unfit = unfit or str(error)
                except ContainerError as error:
                    waiting = str(error)
                if time.monotonic() >= deadline or self._is_removed:
                    break
            time.sleep(PAUSE)
        raise ContainerError(
            f"none of the {len(self.servers)} servers in environment.config.servers was free and fresh within "
            f"{WAIT_SECONDS:g} s: {unfit or waiting}"
        )

    def run(self, command: str, seconds: float, env: Mapping[str, str] | None = None) -> CommandResult:
        """See `Container.run`."""
        request = {"command": command, "cwd": self.cwd, "env": dict(env or {}), "seconds": seconds}
        source = Path(bounded_command.__file__).read_text(encoding="utf-8")
        driver = [self._python, "-I", "-S", "-c", source, json.dumps({**request, "bytes": OUTPUT_BYTES})]
        server = self._server()
        result = parse_result(*server.execute(driver, seconds + CALL_SECONDS))
        return replace(result, output=server.redacted(result.output), stopped=server.redacted(result.stopped))

    def copy_in(self, source: Path, target: str) -> None:
        """See `Container.copy_in`."""
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as packed:
            packed.add(source, arcname=".")
        server = self._server()
        server.upload(archive.getvalue(), _ARCHIVE, CALL_SECONDS)
        code, printed = server.execute(["bash", "-c", _UNPACK, "bash", _ARCHIVE, target], CALL_SECONDS)
        if code != 0:
            raise CopyRefusedError(f"{server.url} cannot copy {source.name} to {target}: {server.printable(printed)}")

    def remove(self) -> None:
        """See `Container.remove`. The server answers no request during a command, so this call may wait for its end."""
        with self._lock:
            self._is_removed = True
            client, self._client = self._client, None
        if client is not None and self._lease is not None:
            try:
                end(client, self._python)
                self._lease.mark(is_used=False)
            except (ContainerError, OSError) as error:
                log.warning("%s; the next episode of this server ends it", error)
            finally:
                self._lease.release()

    def take(self, url: str) -> bool:
        """Claim a server for this episode; return False if another episode uses it, or if this one is over.

        Raises:
            ContainerError: the server cannot be used, or has not ended since an earlier episode.
            UserError: see `start`.
        """
        client = SweRexClient(url)
        held = lease(client.url)
        if held is None:
            return False
        try:
            python = self._claimed(client, held)
        except BaseException:
            held.release()
            raise
        with self._lock:
            self._client, self._lease, self._python = client, held, python
        if self._is_removed:
            self.remove()
        return not self._is_removed

    def _claimed(self, client: SweRexClient, held: ServerLease) -> str:
        """Return the result of `claim`. From the claim on, the lease is marked as used until the server was seen to
        have ended: what a used server answers proves nothing, because its agent may have replaced it."""
        if held.is_used:
            end(client)
        held.mark(is_used=True)
        try:
            return claim(client, held.owner, self.cwd, self.seconds)
        except StaleError:
            end(client)
            held.mark(is_used=False)
            raise
        except (ContainerError, UserError):  # no command of an agent has run
            held.mark(is_used=False)
            raise

    def _server(self) -> SweRexClient:
        if self._client is None:
            raise ContainerError("the remote container has not been started, or was removed")
        return self._client


class UnfitError(ContainerError):
    """The container of a server cannot run the commands of an episode."""


class StaleError(ContainerError):
    """The container of a server has the files of an earlier episode of this machine."""


def claim(client: SweRexClient, owner: str, cwd: str, seconds: float) -> str:
    """Claim a fresh server for one episode, and return the path of the Python that runs it.

    Args:
        owner: see `ServerLease.owner`.
        cwd: folder that is made.
        seconds: wall time in seconds after which the server ends by itself.

    Raises:
        UnfitError: the folder cannot be made, or there is no /proc.
        StaleError: it served an episode of the same owner before.
        ContainerError: the server cannot be used, or served an episode of another owner before.
        UserError: it refuses the token.
    """
    try:
        code, printed = client.execute(["bash", "-c", _CLAIM, "bash", f"{seconds:g}", cwd, owner], CALL_SECONDS)
    except TokenRefusedError as error:
        raise UserError(str(error)) from error
    answer = printed.strip()
    if answer == f"used by {owner}":
        raise StaleError(f"the server {client.url} still has the files of an earlier episode")
    if answer.startswith("used by"):
        raise ContainerError(
            f"the server {client.url} serves an episode of another machine, or of another MTRL_CACHE; use other servers"
        )
    if code != 0 or not answer.startswith("/"):
        raise UnfitError(f"the server {client.url} cannot make the folder {cwd}, or has no /proc")
    return answer


def end(client: SweRexClient, python: str = "python3") -> None:
    """End a server, and return when it has ended.

    Args:
        python: path of a Python of its container.

    Raises:
        ContainerError: it has not ended.
    """
    deadline = time.monotonic() + CALL_SECONDS
    for command in (["bash", "-c", f"{_END} {_IN_BACKGROUND}"], [python, "-I", "-S", "-c", _END_WITHOUT_BASH]):
        with suppress(ContainerError):  # the look below decides
            client.execute(command, max(1.0, deadline - time.monotonic()))
        looked_until = time.monotonic() + END_SECONDS
        while not (is_closed := client.is_closed()) and time.monotonic() < looked_until:
            time.sleep(LOOK_PAUSE)
        if is_closed:
            return
    raise ContainerError(f"the server {client.url} was used by an episode and does not end; end its container")


def parse_result(code: int, printed: str) -> CommandResult:
    """Return the result that `bounded_command` printed. Where it printed none, the command has killed it, or replaced
    what it needs, and counts as stopped.

    Args:
        code: exit code of `bounded_command`.
    """
    try:
        found = json.loads(printed)
        output, exit_code, stopped = found["output"], found["exit_code"], found["stopped"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return CommandResult("", -1, f"the process that ran it ended with exit code {code}")
    kinds = [(output, str), (exit_code, int), (stopped, str)]
    if isinstance(exit_code, bool) or not all(isinstance(value, kind) for value, kind in kinds):
        return CommandResult("", -1, "the process that ran it printed another result")
    return CommandResult(output[:OUTPUT_BYTES], exit_code, stopped[:STOPPED_CHARACTERS])
