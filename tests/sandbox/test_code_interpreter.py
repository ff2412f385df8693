"""The managed code interpreter: the client of boto3 against a local server with the protocol of the service.

The server runs the commands on this machine. The service itself was never called."""

import binascii
import json
import struct
import subprocess
import threading
from base64 import b64decode, b64encode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mtrl.errors import UserError
from mtrl.sandbox.code_interpreter import CodeInterpreter
from mtrl.sandbox.limits import ProcessLimits, SandboxError

SESSIONS = "/code-interpreters/aws.codeinterpreter.v1/sessions"


def event(kind, payload, message_type="event"):
    """One message of an AWS event stream (vnd.amazon.eventstream)."""
    headers = {":message-type": message_type, f":{message_type}-type": kind, ":content-type": "application/json"}
    packed = b"".join(
        struct.pack("!B", len(key)) + key.encode() + struct.pack("!BH", 7, len(value)) + value.encode()
        for key, value in headers.items()
    )
    body = json.dumps(payload).encode()
    prelude = struct.pack("!II", 16 + len(packed) + len(body), len(packed))
    prelude += struct.pack("!I", binascii.crc32(prelude))
    message = prelude + packed + body
    return message + struct.pack("!I", binascii.crc32(message))


class Service(BaseHTTPRequestHandler):
    """A server whose session is a folder of this machine."""

    def do_PUT(self):
        request, path = self.body(), self.path.partition("?")[0]
        self.server.calls.append((self.command, path, request))
        if path.endswith("/start") and self.server.refuses:
            return self.answer(403, {"message": "not allowed"}, {"x-amzn-errortype": "AccessDeniedException"})
        session = {
            "codeInterpreterIdentifier": "aws.codeinterpreter.v1",
            "sessionId": "session-1",
            "createdAt": "2026-01-01T00:00:00Z",
            "lastUpdatedAt": "2026-01-01T00:00:00Z",
        }
        self.answer(200, session)

    def do_POST(self):
        request = self.body()
        self.server.calls.append((self.command, request["name"], self.headers["x-amzn-code-interpreter-session-id"]))
        result = getattr(self, request["name"])(request["arguments"])
        stream = event("result", result) if result else event("throttlingException", {"message": "slow"}, "exception")
        self.answer(200, stream, {"Content-Type": "application/vnd.amazon.eventstream"})

    def executeCommand(self, arguments):
        if "no result" in arguments["command"]:
            return None
        done = subprocess.run(
            ["bash", "-c", arguments["command"]], cwd=self.server.folder, capture_output=True, text=True, timeout=20
        )
        status = done.returncode if done.returncode >= 0 else 128 - done.returncode
        content = {"stdout": done.stdout, "stderr": done.stderr, "exitCode": status, "executionTime": 0.5}
        return {"content": [], "structuredContent": content, "isError": done.returncode != 0}

    def writeFiles(self, arguments):
        for file in arguments["content"]:
            content = file["text"].encode() if "text" in file else b64decode(file["blob"])
            (self.server.folder / file["path"]).write_bytes(content)
        return {"content": [{"type": "text", "text": "written"}], "isError": False}

    def readFiles(self, arguments):
        path = self.server.folder / arguments["paths"][0]
        if not path.exists():
            return {"content": [{"type": "text", "text": "no such file"}], "isError": True}
        blob = b64encode(path.read_bytes()).decode()
        resource = {"type": "blob", "uri": f"file:///{path.name}", "blob": blob}
        return {"content": [{"type": "resource", "resource": resource}], "isError": False}

    def body(self):
        return json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")

    def answer(self, status, body, headers=()):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", **dict(headers)}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def service(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    server.folder, server.calls, server.refuses = tmp_path, [], False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def interpreter(service):
    """Function `interpreter(**options)` that starts a session, which ends with the test at the latest."""
    opened = []

    def start(**options):
        keys = {"aws_access_key_id": "id", "aws_secret_access_key": "secret"}
        url = f"http://127.0.0.1:{service.server_address[1]}"
        opened.append(CodeInterpreter("us-west-2", endpoint_url=url, **keys, **options))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def test_a_session_from_start_to_end(interpreter, service):
    with interpreter() as sandbox:
        sandbox.write_file("main.py", "print(6 * 7)")
        sandbox.write_file("data.bin", b"\x00\xff")
        done = sandbox.run("python3 main.py > answer; cat answer; echo oops >&2; exit 3")
        assert (done.exit_code, done.stdout, done.stderr, done.timed_out) == (3, "42\n", "oops\n", False)
        assert sandbox.read_file("answer") == b"42\n" and sandbox.read_file("data.bin") == b"\x00\xff"
        assert sandbox.run(["printf", "%s", "a b; $HOME"]).stdout == "a b; $HOME"
    sandbox.close()
    with pytest.raises(SandboxError, match="closed"):
        sandbox.run("true")
    methods = [(method, path) for method, path, _ in service.calls if method == "PUT"]
    assert methods == [("PUT", f"{SESSIONS}/start"), ("PUT", f"{SESSIONS}/stop")]
    assert {session for method, _, session in service.calls if method == "POST"} == {"session-1"}


def test_limits_of_time_and_output(interpreter):
    sandbox = interpreter(limits=ProcessLimits(seconds=1, output_bytes=1000))
    slow = sandbox.run("echo begun; sleep 30")
    assert (slow.exit_code, slow.stdout, slow.timed_out, slow.killed_by) == (137, "begun\n", True, "time")
    stubborn = sandbox.run("trap '' TERM; while :; do :; done")
    assert stubborn.timed_out and stubborn.exit_code == 137
    loud = sandbox.run("yes | head -c 100000")
    assert loud.truncated and len(loud.stdout) == 1000 and loud.exit_code == 0


def test_failures_of_the_service_are_errors(interpreter, service):
    sandbox = interpreter()
    with pytest.raises(OSError, match="refused readFiles: no such file"):  # as of ProcessSandbox: the model names paths
        sandbox.read_file("nothing")
    with pytest.raises(SandboxError, match="the code interpreter failed.*slow"):
        sandbox.run("echo no result")
    assert sandbox.run("echo goes on").stdout == "goes on\n"
    service.refuses = True
    with pytest.raises(UserError, match=r"aws\.codeinterpreter\.v1 can be started \(.*check region and permissions"):
        interpreter()
