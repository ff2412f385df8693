"""Install packages into the environment of this interpreter: with uv, or with pip if uv cannot be installed.

    .venv/bin/python scripts/pip_or_uv.py --editable '.[dev]'

uv takes a fraction of pip's time. Both take packages from the same sources. Modules are compiled only if Python may not
store what it compiles at their first import (PYTHONDONTWRITEBYTECODE): compiling all modules takes as long as the rest.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys


def main(what: list[str]) -> int:
    """Install `what`, options and requirements as pip takes them. Return the exit status of the installer."""
    python, compiles = sys.executable, bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    if (uv := uv_command(python)) is not None:
        if attempt([*uv, *["--compile-bytecode"][:compiles], *what], uv_settings(pip_settings(python))) is None:
            return 0
        print("uv could not install the packages, so pip installs them", file=sys.stderr)
    pip = [python, "-m", "pip", "install", "--quiet", "--quiet", "--compile" if compiles else "--no-compile"]
    return subprocess.run([*pip, *what]).returncode


def uv_command(python: str) -> list[str] | None:
    """Return the command that installs packages into the environment of an interpreter; None if uv cannot be
    installed there."""
    if attempt([python, "-m", "pip", "install", "--quiet", "uv"]) is not None:
        return None
    return [python, "-m", "uv", "pip", "install", "--quiet", "--python", python]


def pip_settings(python: str) -> dict[str, str]:
    """Return pip's settings by option, from files and from environment variables, which have priority."""
    done = subprocess.run([python, "-m", "pip", "config", "list"], capture_output=True, text=True)
    found: dict[str, str] = {}
    order = ("global", "install", ":env:")
    for line in sorted(done.stdout.splitlines(), key=lambda line: [line.startswith(f"{one}.") for one in order[::-1]]):
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if section in order:
            found[option] = ast.literal_eval(value)
    return found


def uv_settings(pip: dict[str, str]) -> dict[str, str]:
    """Return environment variables with which uv uses the same package sources as pip."""
    names = {"index-url": "UV_DEFAULT_INDEX", "cert": "SSL_CERT_FILE", "timeout": "UV_HTTP_TIMEOUT"}
    names |= {"default-timeout": "UV_HTTP_TIMEOUT", "proxy": "HTTPS_PROXY"}
    settings = {names[option]: value for option, value in pip.items() if option in names}
    settings["UV_HTTP_TIMEOUT"] = str(max(60, int(float(settings.get("UV_HTTP_TIMEOUT", 60)))))
    if extra := pip.get("extra-index-url"):
        # pip takes the best version of all indexes, uv that of the first index which has the package.
        settings |= {"UV_INDEX": " ".join(extra.split()), "UV_INDEX_STRATEGY": "unsafe-best-match"}
    if links := pip.get("find-links"):
        settings["UV_FIND_LINKS"] = ",".join(links.split())
    if hosts := pip.get("trusted-host"):
        settings["UV_INSECURE_HOST"] = " ".join(hosts.split())
    if pip.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        settings["UV_NO_INDEX"] = "1"
    given = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    return settings | given  # the user's own settings of uv have priority


def attempt(command: list[str], environment: dict[str, str] | None = None) -> str | None:
    """Run a command. Return its output if it failed, else None."""
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return (done.stdout.strip() or f"it ended with status {done.returncode}") if done.returncode else None


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
