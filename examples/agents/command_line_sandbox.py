"""A sandbox for a program that runs commands of the policy itself, such as an agent of the command line.

The program runs under bubblewrap: /usr and the program's own folder are read-only, /workspace and /home are folders
that end with the sandbox, and there is no network. The gateway is reached through a socket: a forwarder inside the
sandbox listens on a port, and one outside sends what arrives to the gateway. All processes end with the episode, and
also when the trainer is killed. The sandbox limits the size of a file, and neither memory, processes nor the disk as a
whole: set such limits around the trainer, for example by its container.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from urllib.parse import urlsplit

from mtrl.sandbox.bubblewrap import find_programs
from mtrl.sandbox.workspace import Workspace

PORT = 8000
"""Port of the gateway inside the sandbox."""
FOLDERS = ("workspace", "home", "gateway")
"""Writable folders of the sandbox, each directly below its root."""
MAX_FILE_BYTES = 2**28
MAX_OUTPUT_BYTES = 2**20

FORWARDER = """
import asyncio, sys
async def pipe(reader, writer):
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()
async def forward(reader, writer):
    other_reader, other_writer = await asyncio.open_unix_connection("/gateway/socket")
    await asyncio.gather(pipe(reader, other_writer), pipe(other_reader, writer))
async def main():
    async with await asyncio.start_server(forward, "127.0.0.1", int(sys.argv[1])):
        process = await asyncio.create_subprocess_exec(*sys.argv[2:])
        sys.exit(await process.wait())
asyncio.run(main())
"""
"""Program that runs inside the sandbox: it forwards connections to the socket, and starts the agent."""


class CommandLineSandbox:
    """Runs programs in a folder of one episode.

    Example::

        async with CommandLineSandbox([programs], client.base_url, 2**26) as sandbox:
            sandbox.files.write("main.py", "print(1)")
            status = await sandbox.run(["qwen", "-p", "print 2"], {"OPENAI_BASE_URL": inside(client.base_url)})
            sandbox.files.snapshot()

    Args:
        folders: folders that are visible inside, read-only; their `bin` and `node_modules/.bin` are on the PATH.
        gateway: an address of the gateway.
        max_bytes: maximum size of all files of a snapshot of the workspace, in bytes.
    """

    def __init__(self, folders: Sequence[Path], gateway: str, max_bytes: int):
        self._folders = [*(folder.absolute() for folder in folders), Path(sys.base_prefix).resolve()]
        self._gateway = urlsplit(gateway)
        self._folder = Path(mkdtemp(prefix="mtrl-cli-"))
        for name in FOLDERS:
            (self._folder / name).mkdir()
        (self._folder / "passwd").write_text("sandbox:x:1000:1000::/home:/bin/bash\n")  # Node asks for the user's name
        self._workspace, self._sockets = (
            os.open(self._folder / name, os.O_RDONLY | os.O_DIRECTORY) for name in ("workspace", "gateway")
        )
        self.files = Workspace(self._workspace, None, max_bytes)
        """The files of /workspace."""
        self.output = b""
        """The last output of the program, at most `MAX_OUTPUT_BYTES` bytes."""

    async def __aenter__(self) -> CommandLineSandbox:
        try:
            # The kernel limits the path of a socket to 107 bytes, and that of the temporary folder may be longer.
            path = f"/proc/self/fd/{self._sockets}/socket"
            self._server = await asyncio.start_unix_server(self._forward, path)
        except BaseException:
            await self._clean_up()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._clean_up()

    async def _clean_up(self) -> None:
        os.close(self._workspace)
        os.close(self._sockets)
        await asyncio.to_thread(_delete, self._folder)

    async def run(self, command: Sequence[str], variables: Mapping[str, str]) -> int:
        """Run a command in /workspace until it ends, and return its exit status. If the caller is cancelled, all
        processes of the command end."""
        process = await asyncio.create_subprocess_exec(
            *self._command_line(command, variables),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={},
        )
        try:
            assert process.stdout is not None
            while part := await process.stdout.read(65536):
                self.output = (self.output + part)[-MAX_OUTPUT_BYTES:]
            return await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    def _command_line(self, command: Sequence[str], variables: Mapping[str, str]) -> list[str]:
        arguments = [find_programs()["bwrap"], "--unshare-all", "--die-with-parent", "--new-session", "--clearenv"]
        arguments += ["--uid", "1000", "--gid", "1000", "--cap-drop", "ALL", *_system()]
        for folder in self._folders:
            arguments += [] if folder.is_relative_to("/usr") else ["--ro-bind", str(folder), str(folder)]
        arguments += ["--ro-bind", str(self._folder / "passwd"), "/etc/passwd"]
        for name in FOLDERS:
            arguments += ["--bind", str(self._folder / name), f"/{name}"]
        path = [f"{folder}/{name}" for folder in self._folders for name in ("node_modules/.bin", "bin")]
        path += ["/usr/bin", "/bin"]
        environment = {"PATH": ":".join(path), "HOME": "/home", "LANG": "C.UTF-8", "TERM": "dumb", **variables}
        for name, value in environment.items():
            arguments += ["--setenv", name, value]
        limits = ["prlimit", f"--fsize={MAX_FILE_BYTES}", "--core=0"]
        started = [f"{self._folders[-1]}/bin/python3", "-c", FORWARDER, str(PORT), *command]
        return [*arguments, "--chdir", "/workspace", "--", *limits, *started]

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            gateway_reader, gateway_writer = await asyncio.open_connection(self._gateway.hostname, self._gateway.port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_pipe(reader, gateway_writer), _pipe(gateway_reader, writer))


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward bytes until one side closes."""
    with suppress(OSError):
        while part := await reader.read(65536):
            writer.write(part)
            await writer.drain()
    writer.close()


def _delete(folder: Path) -> None:
    """Delete a folder in which commands may have taken rights away or nested folders deeper than `shutil.rmtree` can
    descend."""
    for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
        subprocess.run([*command, "--", folder], stderr=subprocess.DEVNULL, check=False)


def inside(address: str) -> str:
    """Return the address inside the sandbox for an address of the gateway."""
    return f"http://127.0.0.1:{PORT}{urlsplit(address).path}"


def _system() -> list[str]:
    """Return bubblewrap's arguments for the part of the host that is visible inside: programs and libraries."""
    arguments = ["--ro-bind", "/usr", "/usr"]
    for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"):
        is_link = Path(path).is_symlink()
        arguments += ["--symlink", os.readlink(path), path] if is_link else ["--ro-bind-try", path, path]
    for name in ("alternatives", "ld.so.cache", "ssl"):
        arguments += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return [*arguments, "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
