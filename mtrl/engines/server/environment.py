"""The environment variables that servers of an engine and programs of agents inherit from the trainer."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from mtrl.config.secret_names import is_secret
from mtrl.engines.server.backend import ServerCommand

DROPPED = re.compile(
    # variables of the trainer's interpreter, and those that libraries in it have set for themselves
    r"LD_PRELOAD|PYTHON.*|__PYVENV_LAUNCHER__|VIRTUAL_ENV(_PROMPT)?|CONDA_.*|PYTEST_.*"
    # settings of the trainer's threads and allocator: an engine has its own
    r"|(OMP|MKL|OPENBLAS|NUMEXPR|KMP|GOMP)_.*|PYTORCH_(CUDA_|HIP_)?ALLOC_CONF"
    # the trainer's rank: an engine would wait for the other ranks
    r"|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|(OMPI|PMI|PMIX)_.*"
    # secrets of other services
    r"|AWS_.*|AZURE_.*|GOOGLE_APPLICATION_CREDENTIALS|SSH_AUTH_SOCK"
)
"""Names of variables that a server does not inherit, as a pattern."""
AGENT_VARIABLES = re.compile(
    # user, host, terminal, locale, and folders of users and of temporary files
    r"HOME|USER|LOGNAME|SHELL|HOSTNAME|TERM|COLORTERM|NO_COLOR|TZ|LANG|LANGUAGE|LC_[A-Z]+|TMPDIR|TEMP|TMP"
    r"|XDG_(CACHE|CONFIG|DATA|STATE)_HOME"
    # proxies and certificates for HTTP
    r"|(http|https|all|no)_proxy|(HTTP|HTTPS|ALL|NO)_PROXY|SSL_CERT_(FILE|DIR)|(REQUESTS|CURL)_CA_BUNDLE"
    # devices and caches of models
    r"|(CUDA|NVIDIA|HIP|ROCR)_VISIBLE_DEVICES|HF_(HOME|HUB_CACHE|HUB_OFFLINE|DATASETS_CACHE|ENDPOINT)|TRANSFORMERS_OFFLINE"
)
"""Names of variables that a program of an agent inherits, as a pattern. The program is not trusted, and a pattern of
forbidden names would never be complete."""
SERVER_SECRETS = frozenset({"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"})
"""Names of secrets that a server needs: the Hub may require a token for the model."""
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
LOOPBACK = "127.0.0.1,localhost,::1"


def server_environment(command: ServerCommand) -> dict[str, str]:
    """Return the environment of a server: the scrubbed environment of the trainer, with the variables of the command
    added.

    The folder of the interpreter comes first in PATH, because engines run ninja and other programs of their own
    environment.
    """
    variables = scrubbed(SERVER_SECRETS)
    folder = str(Path(command.argv[0]).parent) if os.sep in command.argv[0] else ""
    variables["PATH"] = os.pathsep.join(filter(None, (folder, variables.get("PATH", os.defpath))))
    return variables | {"PYTHONUNBUFFERED": "1"} | dict(command.env)


def scrubbed(secrets: Collection[str]) -> dict[str, str]:
    """Return the trainer's environment without its private variables and secrets, for a program that sends HTTP
    requests on this machine.

    Args:
        secrets: names of the secrets that the program needs.
    """
    return _with_network(
        {name: value for name, value in os.environ.items() if name in secrets or not _is_dropped(name)}
    )


def agent_environment(no_proxy_hosts: Collection[str]) -> dict[str, str]:
    """Return the environment of a program of an agent: the variables of `AGENT_VARIABLES`, without those whose values
    are secret, such as URLs with passwords.

    Args:
        no_proxy_hosts: hosts that the program reaches without a proxy, besides this machine.
    """
    variables = {
        k: value for k, value in os.environ.items() if AGENT_VARIABLES.fullmatch(k) and not is_secret(k, value)
    }
    return _with_network(variables, no_proxy_hosts)


def _with_network(variables: dict[str, str], no_proxy_hosts: Collection[str] = ()) -> dict[str, str]:
    """Add the library path of this process's start, and exempt this machine and `no_proxy_hosts` from proxies."""
    if library_path := _initial_environment().get("LD_LIBRARY_PATH"):
        variables["LD_LIBRARY_PATH"] = library_path
    if any(variables.get(name) or variables.get(name.upper()) for name in PROXIES):
        # An engine sends HTTP requests to itself when it starts.
        exempt = ",".join(
            filter(None, (variables.get("no_proxy") or variables.get("NO_PROXY"), LOOPBACK, *no_proxy_hosts))
        )
        variables |= {"no_proxy": exempt, "NO_PROXY": exempt}
    return variables


def secrets_of(environment: Mapping[str, str]) -> list[str]:
    """Return the values of secret variables, which no log or message may show."""
    return [value for name, value in environment.items() if value and is_secret(name, value)]


def _is_dropped(name: str) -> bool:
    return bool(DROPPED.fullmatch(name)) or is_secret(name) or name == "LD_LIBRARY_PATH"


def _initial_environment() -> dict[str, str]:
    """Return the environment that this process was started with. Libraries (OpenCV, vLLM) add their own folders to
    LD_LIBRARY_PATH later."""
    with suppress(OSError):
        lines = Path("/proc/self/environ").read_bytes().split(b"\0")
        return dict(os.fsdecode(line).partition("=")[::2] for line in lines if line)
    return dict(os.environ)
