"""Hostile commands on a remote machine: a session of Amazon Bedrock AgentCore's Code Interpreter, with the interface
of `ProcessSandbox`.

The service provides the isolation (a microVM per session), the limits and the network mode, and it bills the sessions.
Operations: https://docs.aws.amazon.com/bedrock-agentcore/latest/APIReference, `InvokeCodeInterpreter`.
"""

from __future__ import annotations

import shlex
import threading
from typing import Any

from mtrl.errors import UserError, missing_extra
from mtrl.sandbox.limits import ProcessLimits, ProcessResult, SandboxError

MANAGED = "aws.codeinterpreter.v1"
"""Identifier of the interpreter that every account has. It has only the network access that its region permits."""
_GRACE = 30
"""Seconds that an answer may take longer than its command."""
_TIMED_OUT = 124
"""Exit status of coreutils' timeout. A command that ends with it by itself counts as timed out too."""


class CodeInterpreter:
    """A folder on another machine, and commands that run in it one after another.

    Only the limits `seconds` and `output_bytes` apply; the other limits are the service's own. boto3 finds the
    credentials.

    Example::

        with CodeInterpreter(region="us-west-2") as sandbox:
            sandbox.write_file("main.py", "print(6 * 7)")
            sandbox.run("python3 main.py").stdout           # '42\\n'

    Raises:
        UserError: boto3 is not installed, or the session cannot be started.
    """

    def __init__(
        self,
        region: str | None = None,
        identifier: str = MANAGED,
        limits: ProcessLimits | None = None,
        session_seconds: int = 900,
        **client: Any,
    ):
        """
        Args:
            region: AWS region of the service; default: boto3's own.
            identifier: identifier of the managed interpreter, or of one of your own.
            session_seconds: seconds after which the service ends the session, if it is not closed before.
            client: further arguments of `boto3.client`, such as `endpoint_url`.
        """
        self.limits = limits or ProcessLimits()
        self.identifier = identifier
        self._client = _connect(region, self.limits.seconds + _GRACE, client)
        self._lock = threading.Lock()
        try:
            started = self._client.start_code_interpreter_session(
                codeInterpreterIdentifier=identifier, sessionTimeoutSeconds=session_seconds
            )
        except _errors() as error:
            raise UserError(
                f"no session of code interpreter {identifier} can be started ({error}); check region and permissions"
            ) from error
        self._session: str | None = started["sessionId"]

    def __enter__(self) -> CodeInterpreter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, command: str | list[str], timeout: float | None = None) -> ProcessResult:
        """Run one command in the session's folder.

        Args:
            command: a line for bash, or a program and its arguments.
            timeout: seconds of wall time, at most the limit; default: the limit.

        Raises:
            SandboxError: the session is closed, or the service failed; a failure of the command raises nothing.
        """
        line = command if isinstance(command, str) else shlex.join(command)
        seconds = min(timeout or self.limits.seconds, self.limits.seconds)
        limited = f"timeout -k 1 {seconds:g} bash -c {shlex.quote(line)}"
        content = self._invoke("executeCommand", command=limited).get("structuredContent") or {}
        stdout, cut_stdout = self._cut(content.get("stdout") or "")
        stderr, cut_stderr = self._cut(content.get("stderr") or "")
        status = int(content.get("exitCode", 1))
        timed_out = status in (_TIMED_OUT, 128 + 9)
        return ProcessResult(
            exit_code=137 if timed_out else status,
            stdout=stdout,
            stderr=stderr,
            truncated=cut_stdout or cut_stderr,
            timed_out=timed_out,
            killed_by="time" if timed_out else None,
            seconds=float(content.get("executionTime") or 0.0),
        )

    def write_file(self, path: str, content: str | bytes) -> None:
        """Write a file of the session's folder.

        Raises:
            OSError: the service refused the path or the content.
        """
        key = "text" if isinstance(content, str) else "blob"
        self._invoke("writeFiles", content=[{"path": path, key: content}])

    def read_file(self, path: str) -> bytes:
        """Read a file of the session's folder.

        Raises:
            OSError: the file does not exist, or the service refused the path.
        """
        for item in self._invoke("readFiles", paths=[path]).get("content", []):
            resource = item.get("resource") or {}
            if "blob" in resource:
                return bytes(resource["blob"])
            if "text" in resource:
                return str(resource["text"]).encode()
        raise FileNotFoundError(f"there is no file {path}")

    def close(self) -> None:
        """End the session. Further calls do nothing."""
        with self._lock:
            session, self._session = self._session, None
        if session is None:
            return
        try:
            self._client.stop_code_interpreter_session(codeInterpreterIdentifier=self.identifier, sessionId=session)
        except _errors() as error:
            raise SandboxError(
                f"the session could not be ended, and is billed until it ends by itself: {error}"
            ) from error

    def _invoke(self, name: str, **arguments: Any) -> dict[str, Any]:
        """Run one operation of the session, and return its result.

        Raises:
            SandboxError: the session is closed, or the service failed.
            OSError: the service refused the arguments of an operation on files.
        """
        with self._lock:
            if self._session is None:
                raise SandboxError("the sandbox is closed")
            try:
                stream = self._client.invoke_code_interpreter(
                    codeInterpreterIdentifier=self.identifier, sessionId=self._session, name=name, arguments=arguments
                )["stream"]
                results = [event["result"] for event in stream if "result" in event]
            except _errors() as error:
                raise SandboxError(f"the code interpreter failed: {error}") from error
        if not results:
            raise SandboxError(f"the code interpreter gave no result of {name}")
        if results[-1].get("isError") and name != "executeCommand":
            raise OSError(f"the code interpreter refused {name}: {_texts(results[-1])}")  # paths are the model's
        return results[-1]

    def _cut(self, text: str) -> tuple[str, bool]:
        cut = text.encode(errors="replace")[: self.limits.output_bytes].decode(errors="replace")
        return cut, len(cut) < len(text)


def _connect(region: str | None, seconds: float, options: dict[str, Any]) -> Any:
    try:
        import boto3
        from botocore.config import Config
    except ImportError as error:
        raise missing_extra("boto3", "sagemaker") from error
    config = Config(read_timeout=seconds, retries={"mode": "standard", "max_attempts": 3})
    try:
        return boto3.client("bedrock-agentcore", region_name=region, config=config, **options)
    except _errors() as error:
        raise UserError(
            f"the code interpreter in region {region} cannot be reached ({error}); name a region"
        ) from error


def _errors() -> tuple[type[Exception], ...]:
    """Return the exception types that boto3 raises."""
    from botocore.exceptions import BotoCoreError, ClientError

    return BotoCoreError, ClientError


def _texts(result: dict[str, Any]) -> str:
    return " ".join(str(item.get("text", "")) for item in result.get("content", []))[:300]
