"""What a server of an engine gets of the trainer's environment."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from mtrl.config.secret_names import is_secret
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
PASSED_ON = re.compile(
    # who and where it runs, how it writes, and where files of users and temporary ones are
    r"HOME|USER|LOGNAME|SHELL|HOSTNAME|TERM|COLORTERM|NO_COLOR|TZ|LANG|LANGUAGE|LC_[A-Z]+|TMPDIR|TEMP|TMP"
    r"|XDG_(CACHE|CONFIG|DATA|STATE)_HOME"
    # how it reaches others over HTTP
    r"|(http|https|all|no)_proxy|(HTTP|HTTPS|ALL|NO)_PROXY|SSL_CERT_(FILE|DIR)|(REQUESTS|CURL)_CA_BUNDLE"
    # where it finds devices and models
    r"|(CUDA|NVIDIA|HIP|ROCR)_VISIBLE_DEVICES|HF_(HOME|HUB_CACHE|HUB_OFFLINE|DATASETS_CACHE|ENDPOINT)|TRANSFORMERS_OFFLINE"
)
"""What a program of an agent gets, which may be anybody's: a list of what may not be passed on is never complete."""
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


def scrubbed(secrets: Collection[str]) -> dict[str, str]:
    """The trainer's environment without what is its own, for a program that asks over HTTP on this machine.

    Args:
        secrets: names of those that the program needs.
    """
    return _connected({name: value for name, value in os.environ.items() if name in secrets or not _is_dropped(name)})


def agent_environment(straight: Collection[str]) -> dict[str, str]:
    """What a program of an agent gets of the trainer's environment: names of `PASSED_ON`, without passwords in URLs.

    Args:
        straight: hosts that it reaches without a proxy, besides this machine.
    """
    kept = {k: value for k, value in os.environ.items() if PASSED_ON.fullmatch(k) and not is_secret(k, value)}
    return _connected(kept, straight)


def _connected(kept: dict[str, str], straight: Collection[str] = ()) -> dict[str, str]:
    """With the library path that this process was started with, and no proxy before this machine."""
    if library_path := _first_environment().get("LD_LIBRARY_PATH"):
        kept["LD_LIBRARY_PATH"] = library_path
    if any(kept.get(name) or kept.get(name.upper()) for name in PROXIES):
        # An engine asks itself over HTTP when it starts.
        exempt = ",".join(filter(None, (kept.get("no_proxy") or kept.get("NO_PROXY"), LOOPBACK, *straight)))
        kept |= {"no_proxy": exempt, "NO_PROXY": exempt}
    return kept


def secrets_of(environment: Mapping[str, str]) -> list[str]:
    """Values that nobody should read."""
    return [value for name, value in environment.items() if value and is_secret(name, value)]


def _is_dropped(name: str) -> bool:
    return bool(DROPPED.fullmatch(name)) or is_secret(name) or name == "LD_LIBRARY_PATH"


def _first_environment() -> dict[str, str]:
    """What this process was started with: libraries (OpenCV, vLLM) put folders of theirs into LD_LIBRARY_PATH."""
    with suppress(OSError):
        lines = Path("/proc/self/environ").read_bytes().split(b"\0")
        return dict(os.fsdecode(line).partition("=")[::2] for line in lines if line)
    return dict(os.environ)
