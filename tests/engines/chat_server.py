"""A real HTTP server with OpenAI's wire format, whose answers and failures a test chooses."""

import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Reply:
    """The answer to one request."""

    status: int = 200
    body: object = None
    """JSON value, or raw bytes; None: the connection is closed without an answer."""
    headers: dict = field(default_factory=dict)
    before: float = 0.0
    """Seconds until the first byte."""
    between: float = 0.0
    """Seconds between two bytes."""


def chat_reply(text, *, calls=None, finish="stop", prompt=11, completion=5, cached=3, **message):
    """Return a chat completion."""
    message = {"role": "assistant", "content": text, **message}
    if calls:
        message["tool_calls"] = calls
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
    return Reply(body={"id": "x", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage})


def refusal(status, message, code=None, **headers):
    """Return an error in the format of OpenAI."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return Reply(status, {"error": error}, {name.replace("_", "-"): value for name, value in headers.items()})


class ChatServer:
    """`with ChatServer(answer) as server:` where `answer(body, n)` replies to the n-th request to `path`."""

    def __init__(self, answer, path="/v1/chat/completions"):
        self.answer, self.requests, self.headers, self.times = answer, [], [], []
        self.busy = self.most_busy = 0
        self.lock = threading.Lock()
        self.connections, self.changed = 0, threading.Condition()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self):
                super().setup()
                outer.count_connections(1)

            def finish(self):
                super().finish()
                outer.count_connections(-1)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with outer.lock:
                    number = len(outer.requests)
                    outer.requests.append(body)
                    outer.headers.append({name.lower(): value for name, value in self.headers.items()})
                    outer.times.append(time.monotonic())
                    outer.busy += 1
                    outer.most_busy = max(outer.most_busy, outer.busy)
                try:
                    found = self.path == path
                    reply = outer.answer(body, number) if found else refusal(404, f"no {self.path} here")
                    self.reply(reply)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True
                finally:
                    with outer.lock:
                        outer.busy -= 1

            def reply(self, reply):
                time.sleep(reply.before)
                if reply.body is None:
                    self.close_connection = True
                    return
                content = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
                self.send_response(reply.status)
                for name, value in {"content-length": str(len(content)), **reply.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                for at in range(len(content)) if reply.between else ():
                    self.wfile.write(content[at : at + 1])
                    self.wfile.flush()
                    time.sleep(reply.between)
                if not reply.between:
                    self.wfile.write(content)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def count_connections(self, more):
        with self.changed:
            self.connections += more
            self.changed.notify_all()

    def loses_all_connections(self, seconds=20.0):
        """Wait until clients have closed all connections, for `seconds` at most, and return whether they have."""
        with self.changed:
            return self.changed.wait_for(lambda: not self.connections, seconds)

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def always(*replies):
    """Return a function that gives the replies in order and repeats the last one."""
    return lambda body, n: replies[min(n, len(replies) - 1)]
