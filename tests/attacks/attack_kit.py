"""Helpers of the attack tests: the type of attacks, their generation from templates, and checks after each attack."""

import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[2]
MEGABYTE = 2**20


@dataclass(frozen=True)
class Attack:
    """One response, command or file name of a hostile policy."""

    family: str
    text: str


def generate(family: str, templates: Iterable[str], **fillings: Iterable[str]) -> list[Attack]:
    """Return every template with every combination of the fillings for its `{{name}}`, in order, without duplicates."""
    texts: dict[str, None] = {}
    for template in templates:
        named = [name for name in fillings if f"{{{{{name}}}}}" in template]
        for values in product(*(list(fillings[name]) for name in named)):
            text = template
            for name, value in zip(named, values, strict=True):
                text = text.replace(f"{{{{{name}}}}}", value)
            texts[text] = None
    return [Attack(family, text) for text in texts]


def distinct(attacks: Iterable[Attack]) -> int:
    return len({attack.text for attack in attacks})


class Outside:
    """Canary files, a server that must stay unreached, and the processes of a test; attacks use `marker` in names."""

    def __init__(self, folder: Path, marker: str):
        self.marker, self.folder = marker, folder
        self.canary = folder / "canary.txt"
        self.canary.write_text(f"secret-{marker}")
        (folder / "canary").mkdir()
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.setblocking(False)
        self.port = self.server.getsockname()[1]
        self._before = self._tree()
        self._cwd = os.getcwd()

    @property
    def seconds(self) -> str:
        """The marker as a number that `sleep` takes."""
        return f"99{int(self.marker[4:], 16) % 10**9}"

    @property
    def secret(self) -> str:
        return f"secret-{self.marker}"

    def fill(self, text: str, **more: str) -> str:
        """Return an attack with its placeholders replaced by the names of its targets."""
        values = {"marker": self.marker, "canary": str(self.canary), "folder": str(self.folder), **more}
        for name, value in values.items():
            text = text.replace(f"{{{{{name}}}}}", value)
        return text

    def check(self) -> None:
        """Check that no file outside has changed, the server was not reached, and no process is left."""
        assert self._tree() == self._before, "the canaries are unchanged"
        try:
            self.server.accept()
        except BlockingIOError:
            pass
        else:
            raise AssertionError("an attack reached the server")
        assert not self._processes(), "no process is left"
        assert os.getcwd() == self._cwd

    def check_files(self) -> None:
        """Check that no file in the repository, home, `/tmp` or `/` has the marker in its name."""
        walked = (
            Path(parent, name)
            for parent, folders, files in os.walk(ROOT)
            if not _prune(folders)
            for name in (*folders, *files)
        )
        for path in (*walked, *Path.home().iterdir(), *Path("/tmp").iterdir(), *Path("/").iterdir()):
            assert self.marker not in path.name or path == self.folder, path

    def close(self) -> None:
        self.server.close()

    def _processes(self) -> list[str]:
        """Return the command lines of all processes of this machine that contain the marker."""
        lines = (_command_line(path.name) for path in Path("/proc").glob("[0-9]*"))
        return [line for line in lines if self.marker in line or self.seconds in line]

    def _tree(self) -> dict[str, str]:
        files = sorted(path for path in self.folder.rglob("*"))
        return {str(path): sha256(path.read_bytes()).hexdigest() if path.is_file() else "" for path in files}


def _prune(folders: list[str]) -> None:
    folders[:] = [name for name in folders if name not in {".git", ".venv", "node_modules", "outputs", "runs"}]


def _command_line(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


class Usage:
    """Maximum increase of the memory of this process in bytes, and elapsed time in seconds."""

    bytes = 0
    seconds = 0.0


@contextmanager
def measured() -> Iterator[Usage]:
    """Measure memory by the peak of the kernel (VmHWM), which is reset first unless that is forbidden."""
    usage = Usage()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before, started = _status("VmRSS"), time.monotonic()
    yield usage
    usage.bytes, usage.seconds = _status("VmHWM") - before, time.monotonic() - started


def _status(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])
