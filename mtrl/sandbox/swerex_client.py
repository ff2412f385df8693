"""A client of one server of SWE-ReX (`swerex-remote`), with limits on the time and the size of every answer.

The protocol is that of `swerex.server` (SWE-ReX 1.4): JSON over HTTP, with the token in the header X-API-Key. SWE-ReX's
own client is not used: it calls the function that an answer names (`swerex.runtime.remote`,
`_handle_transfer_exception`), and an agent that controls its container also controls these answers.
"""

from __future__ import annotations

import json
import os
import re
import ssl
from collections.abc import Sequence
from typing import Any

import httpx

from mtrl.errors import UserError
from mtrl.sandbox.bounded_request import send
from mtrl.sandbox.container import ContainerError
from mtrl.utils.http_client import ResponseTooLargeError, error_message, printable
from mtrl.utils.serving import is_loopback
from mtrl.utils.text import redacted

TOKEN_VARIABLE = "MTRL_SWEREX_TOKEN"
LARGEST_ANSWER = 16 * 2**20
"""Maximum size of an answer in bytes. In JSON a character of a command's output may take seven bytes."""
LOOK_SECONDS = 5.0
"""Time limit of a look whether a server has ended, in seconds."""
_GONE = (502, 503, 504)
"""HTTP statuses of a proxy whose server has ended."""
_REFUSED = (401, 403)
"""HTTP statuses of a wrong token."""


class TokenRefusedError(ContainerError):
    """A server refuses the token."""


class SweRexClient:
    """Requests to one server.

    Args:
        url: address of the server, http://127.0.0.1:PORT or https://HOST:PORT.

    Raises:
        UserError: the address is invalid, or the environment variable MTRL_SWEREX_TOKEN is not set.
    """

    def __init__(self, url: str):
        self.url = checked_url(url)
        self._token = token()
        self._tls = ssl.create_default_context() if self.url.startswith("https:") else None

    def execute(self, command: Sequence[str], seconds: float) -> tuple[int, str]:
        """Run a program on the server, and return its exit code and its standard output.

        The server answers no other request meanwhile.

        Args:
            command: program and arguments; no shell reads them.
            seconds: time limit of the answer in seconds; the program itself is not ended.

        Raises:
            ContainerError: the server cannot be reached, gave no answer in time, or failed.
            TokenRefusedError: it refuses the token.
        """
        answer = self._post("execute", seconds, json={"command": list(command)})
        code, output = answer.get("exit_code"), answer.get("stdout")
        if isinstance(code, bool) or not isinstance(code, int) or not isinstance(output, str):
            raise ContainerError(f"the server {self.url} gave an answer of another form than swerex-remote")
        return code, output

    def upload(self, content: bytes, path: str, seconds: float) -> None:
        """Write a file on the server.

        Raises:
            ContainerError: see `execute`.
        """
        self._post("upload", seconds, data={"target_path": path}, files={"file": ("upload", content)})

    def redacted(self, text: str) -> str:
        """Return text from the container with stars in place of the token, which an agent sees among the arguments of
        the server."""
        return redacted(text, [self._token])

    def printable(self, text: str) -> str:
        """Return text from the container as one short line for a message, without the token."""
        return printable(text, self._token)

    def is_closed(self) -> bool:
        """Whether the server has ended: its machine refuses the connection or ends it without an answer, or a proxy
        reports that the server is gone. A server that is busy has not ended, nor one whose machine cannot be reached. A
        server that an agent has replaced can pretend to have ended."""
        try:
            status, _ = self._send("GET", "is_alive", LOOK_SECONDS)
        except (TimeoutError, ResponseTooLargeError):
            return False
        except ConnectionError as error:
            return isinstance(error.__cause__, ConnectionError)  # other errors of the network prove nothing
        return status in _GONE

    def _send(self, method: str, what: str, seconds: float, **body: Any) -> tuple[int, bytes]:
        # the size limit is that of the body as sent
        headers = {"X-API-Key": self._token, "Accept-Encoding": "identity"}
        request = httpx.Request(method, f"{self.url}/{what}", headers=headers, **body)
        return send(request, seconds, LARGEST_ANSWER, self._tls)

    def _post(self, what: str, seconds: float, **body: Any) -> dict[str, Any]:
        try:
            status, content = self._send("POST", what, seconds, **body)
        except TimeoutError as error:
            raise ContainerError(f"the server {self.url} gave no answer within {seconds:g} s") from error
        except ConnectionError as error:
            reason = self.printable(str(error))
            raise ContainerError(f"the server {self.url} cannot be reached: {reason}") from error
        except ResponseTooLargeError as error:
            raise ContainerError(f"the server {self.url} gave an answer of more than {LARGEST_ANSWER} bytes") from error
        if status in _REFUSED:
            raise TokenRefusedError(
                f"the server {self.url} refuses the token of {TOKEN_VARIABLE}; set it to the value of its --auth-token"
            )
        if status != httpx.codes.OK:
            raise ContainerError(f"the server {self.url} answered HTTP {status}: {self._message(content)}")
        return self._parsed(content)

    def _message(self, content: bytes) -> str:
        """Return the message of an error; the server puts that of an exception under `swerexception`."""
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            found = None
        inner = found.get("swerexception") if isinstance(found, dict) else None
        return self.printable(error_message(json.dumps(inner).encode() if inner else content))

    def _parsed(self, content: bytes) -> dict[str, Any]:
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ContainerError(f"the server {self.url} gave an answer of another form than swerex-remote")
        return found


def token() -> str:
    """Return the token for the servers, from the environment variable MTRL_SWEREX_TOKEN.

    Raises:
        UserError: the variable is not set, or has characters that no header can hold.
    """
    found = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not found:
        raise UserError(
            f"environment.config.backend=swerex needs the token of its servers; set the environment variable "
            f"{TOKEN_VARIABLE} to the value of their --auth-token"
        )
    if not found.isascii() or not found.isprintable():
        raise UserError(f"the environment variable {TOKEN_VARIABLE} has characters that no header can hold")
    return found


def checked_url(url: str) -> str:
    """Return the address of a server in the form SCHEME://HOST:PORT, which is the same for all ways to write it.

    Raises:
        UserError: the address is invalid, or the token would be sent unencrypted to another machine.
    """
    try:
        address = httpx.URL(url)
    except (httpx.InvalidURL, TypeError):
        address = httpx.URL()
    scheme, host, port = address.scheme, address.host, address.port
    is_bare = not (address.userinfo or address.path.strip("/") or any(mark in str(url) for mark in "?# "))
    if scheme not in ("http", "https") or not host or not is_bare or (port is not None and not 0 < port < 2**16):
        shown = printable(re.sub(r"//.*@", "//***@", str(url)))
        raise UserError(
            f"environment.config.servers={shown} is no address; write https://HOST:PORT, or http://127.0.0.1:PORT"
        )
    if scheme == "http" and not is_loopback(host):
        raise UserError(
            f"environment.config.servers={url} would get the token unencrypted; use https, or a tunnel to 127.0.0.1"
        )
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port or (443 if scheme == 'https' else 80)}"
