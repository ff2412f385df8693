"""A proxy between trainer and servers that answers errors or delays answers."""

import http.client
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

ENDS_OF_UPDATES = ("/finish_weight_update", "/update_weight_version")
"""Path, for vLLM and SGLang, of the request that gives new weights their version."""


class FaultyProxy(ThreadingHTTPServer):
    """Proxy for the server at `target`, with the address `url`. It runs in threads until `close`."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, target: str):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = urlsplit(target)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.errors = 0
        """Number of requests for turns that get HTTP 500."""
        self.lost = 0
        """Number of updates that are reported as done, and not passed on."""
        self.delay = 0.0
        """Delay of each request in seconds."""
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def close(self):
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        """Do nothing: either side may have disconnected, which the tests cause."""


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.pass_on()

    def do_POST(self):
        self.pass_on()

    def pass_on(self):
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        time.sleep(self.server.delay)
        if self.server.errors and self.path.endswith("/generate"):
            self.server.errors -= 1
            self.answer(500, b'{"error": "a fault of the proxy"}', "application/json")
            return
        if self.server.lost and self.path.endswith(ENDS_OF_UPDATES):
            self.server.lost -= 1
            self.answer(200, b'{"success": true, "message": "", "status": "ok"}', "application/json")
            return
        target = http.client.HTTPConnection(self.server.target.hostname, self.server.target.port)
        target.request(self.command, self.path, body, {**self.headers, "Connection": "close"})
        response = target.getresponse()
        self.answer(response.status, response.read(), response.headers.get("content-type", "text/plain"))
        target.close()

    def answer(self, status, content, kind):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        """Write no log."""
