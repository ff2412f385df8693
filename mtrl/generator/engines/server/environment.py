"""What a server of an engine gets of the trainer's environment."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from mtrl.generator.engines.server.backend import Command

DROPPED = re.compile(
    # of the trainer's interpreter, and what libraries in it have set for themselves
    r"LD_PRELOAD|PYTHON.*|__PYVENV_LAUNCHER__|VIRTUAL_ENV(_PROMPT)?|CONDA_.*|PYTEST_.*"
    # its threads and its allocator: an engine has its own
    r"|(OMP|MKL|OPENBLAS|NUMEXPR|KMP|GOMP)_.*|PYTORCH_(CUDA_|HIP_)?ALLOC_CONF"
    # its place among ranks: an engine would wait for the others
    r"|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|(OMPI|PMI|PMIX)_.*"
    # secrets of other services
    r"|AWS_.*|AZURE_.*|GOOGLE_APPLICATION_CREDENTIALS|SSH_AUTH_SOCK"
)
SECRET = re.compile(r"(.*_)?(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL)S?", re.IGNORECASE)
KEPT = frozenset({"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"})
"""Secrets that a server needs: a model may be behind a gate of the Hub."""
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
LOOPBACK = "127.0.0.1,localhost,::1"


def server_environment(command: Command) -> dict[str, str]:
    """The trainer's environment without what is its own, and with the command's on top.

    The programs beside the interpreter come first in PATH: engines run ninja and others of their own environment.
    """
    kept = scrubbed(KEPT)
    folder = str(Path(command.argv[0]).parent) if os.sep in command.argv[0] else ""
    kept["PATH"] = os.pathsep.join(filter(None, (folder, kept.get("PATH", os.defpath))))
    return kept | {"PYTHONUNBUFFERED": "1"} | dict(command.env)


def scrubbed(secrets: Collection[str] = (), straight: Collection[str] = ()) -> dict[str, str]:
    """The trainer's environment without what is its own, for a program that asks over HTTP on this machine.

    Args:
        secrets: names of those that the program needs.
        straight: hosts that it reaches without a proxy, besides this machine.
    """
    kept = {name: value for name, value in os.environ.items() if name in secrets or not _is_dropped(name)}
    if library_path := _first_environment().get("LD_LIBRARY_PATH"):
        kept["LD_LIBRARY_PATH"] = library_path
    if any(kept.get(name) or kept.get(name.upper()) for name in PROXIES):
        # An engine asks itself over HTTP when it starts.
        exempt = ",".join(filter(None, (kept.get("no_proxy") or kept.get("NO_PROXY"), LOOPBACK, *straight)))
        kept |= {"no_proxy": exempt, "NO_PROXY": exempt}
    return kept


def secrets_of(environment: Mapping[str, str]) -> list[str]:
    """Values that nobody should read."""
    return [value for name, value in environment.items() if value and SECRET.fullmatch(name)]


def _is_dropped(name: str) -> bool:
    return bool(DROPPED.fullmatch(name) or SECRET.fullmatch(name)) or name == "LD_LIBRARY_PATH"


def _first_environment() -> dict[str, str]:
    """What this process was started with: libraries (OpenCV, vLLM) put folders of theirs into LD_LIBRARY_PATH."""
    with suppress(OSError):
        lines = Path("/proc/self/environ").read_bytes().split(b"\0")
        return dict(os.fsdecode(line).partition("=")[::2] for line in lines if line)
    return dict(os.environ)
