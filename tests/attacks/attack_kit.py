"""What all attacks share: their type, how a grammar makes many of few, and what must be the same after each."""

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
    """Every template with every combination of the fillings that it names as `{{name}}`, in order, without repeats."""
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
    """Canaries, a server that nobody may reach, and the processes of this test. `marker` names what attacks make."""

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
        """An attack with the names that it is aimed at."""
        values = {"marker": self.marker, "canary": str(self.canary), "folder": str(self.folder), **more}
        for name, value in values.items():
            text = text.replace(f"{{{{{name}}}}}", value)
        return text

    def check(self) -> None:
        """Nothing outside has changed, nobody called, and no process is left."""
        assert self._tree() == self._before, "the canaries are as they were"
        try:
            self.server.accept()
        except BlockingIOError:
            pass
        else:
            raise AssertionError("somebody reached the server")
        assert not self._processes(), "no process is left"
        assert os.getcwd() == self._cwd

    def check_files(self) -> None:
        """No file of that name anywhere where one could be: the repository, home, temporary folders."""
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
        """Command lines on this whole machine, orphans' too, that name the marker."""
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


class Taken:
    """Bytes by which the memory of this process rose at most, and seconds that went by."""

    bytes = 0
    seconds = 0.0


@contextmanager
def measured() -> Iterator[Taken]:
    """The peak is the kernel's own (VmHWM), set back first; where that is forbidden, it is that of the whole run."""
    taken = Taken()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before, started = _status("VmRSS"), time.monotonic()
    yield taken
    taken.bytes, taken.seconds = _status("VmHWM") - before, time.monotonic() - started


def _status(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])
