"""`python toy_http_server.py PORT`: a server of the toy model over HTTP. Its token is in the environment."""

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

VOCABULARY = 50
"""The same value as in toy_servers.py, which is not imported here, so that a server starts fast."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    version = 0
    unpaused = threading.Event()
    unpaused.set()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.headers["authorization"] != f"Bearer {os.environ['TOY_TOKEN']}":
            self.answer(401, {"error": "wrong token"})
        else:
            self.answer(200, getattr(self, self.path[1:])(**body))

    def version(self):
        return self.server.version

    def generate(self, prompt, tokens, tick):
        context, spans = list(prompt), []
        for _ in range(tokens):
            time.sleep(tick)
            self.server.unpaused.wait()
            version = self.server.version
            context.append((sum(context) * 7 + len(context) * 3 + version * 11) % VOCABULARY)
            spans.append([version, 1])
        return {"token_ids": context[len(prompt) :], "spans": spans}

    def pause(self):
        self.server.unpaused.clear()

    def resume(self):
        self.server.unpaused.set()

    def load(self, version):
        self.server.version = version

    def answer(self, status, value):
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        """Write no log."""


if __name__ == "__main__":
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
