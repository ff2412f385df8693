"""The web server of the viewer: access control and responses. `mtrl.view.http_api` defines their content."""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mtrl.utils.files import plain
from mtrl.utils.serving import is_loopback
from mtrl.view.http_api import OF_A_RUN, Api
from mtrl.view.query import Query, QueryRefusal

log = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class Guard:
    """Access control of the server.

    - Only GET and HEAD are allowed.
    - On a loopback address, the `Host` header must be a loopback name. A page elsewhere can point its own name at this
      machine (DNS rebinding), but it cannot send another `Host`.
    - All data of a run need the token, because every user of a machine can reach its loopback. The token is the cookie
      that the printed URL sets, or `Authorization: Bearer`. The page itself holds no data and needs no token, so that a
      link into it opens from anywhere.
    """

    def __init__(self, host: str, port: int, token: str):
        self.token = token
        self.cookie = f"mtrl_view_{port}"
        """Name of the cookie. It contains the port, because cookies are shared between the ports of a host."""
        self._checks_host = is_loopback(host)

    def check(self, request: Any) -> None:
        """Check the access of a request.

        Raises:
            Refusal: The request is not allowed.
        """
        if request.method not in ("GET", "HEAD"):
            raise QueryRefusal(405, "only GET is answered here")
        host = request.headers.get("host", "")
        if self._checks_host and not is_loopback(name_of(f"//{host}") or ""):
            raise QueryRefusal(
                403, "the Host header is not this machine's loopback; open the URL that mtrl.view printed"
            )
        origin = request.headers.get("origin")
        if origin is not None and place_of(origin) != host:
            raise QueryRefusal(403, "the request comes from another site")
        if request.url.path.startswith("/api/") and not self._has_token(request):
            raise QueryRefusal(401, "the token is missing or wrong; open the URL that mtrl.view printed")

    def _has_token(self, request: Any) -> bool:
        given = [request.cookies.get(self.cookie, ""), request.headers.get("authorization", "").removeprefix("Bearer ")]
        return any(self.is_token(each) for each in given)

    def is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), self.token.encode())

    def cookie_header(self) -> str:
        return f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/"


def name_of(url: str) -> str | None:
    """Return the host of a URL, without port and brackets."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def place_of(url: str) -> str | None:
    """Return the host and the port of a URL."""
    try:
        return urlsplit(url).netloc
    except ValueError:
        return None


def to_json(value: Any) -> bytes:
    """Return strict JSON. Numbers that are not finite are null, and half a surrogate pair stays an escape."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(plain(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def create_app(api: Api, guard: Guard) -> Any:
    """Return the FastAPI application. It uses plain routes, because `Query` checks the parameters of a request with
    readable errors."""
    from fastapi import FastAPI, Request, Response

    app = FastAPI(title="mtrl view", docs_url=None, redoc_url=None, openapi_url=None)

    def answer(content: bytes, media_type: str, status: int = 200, **headers: str) -> Response:
        return Response(content, status, {**HEADERS, **headers}, media_type)

    def refused(status: int, sentence: str) -> Response:
        return answer(to_json({"error": sentence}), "application/json", status)

    def route(found: Callable[[Request, Query], Any]) -> Callable[[Request], Response]:
        def endpoint(request: Request) -> Response:
            try:
                body = to_json(found(request, Query(request.query_params.multi_items())))
            except QueryRefusal as refusal:
                return refused(refusal.status, str(refusal))
            except Exception as error:
                log.exception("%s failed", request.url.path)
                return refused(500, f"this cannot be shown ({type(error).__name__}); it is a bug of the viewer")
            return answer(body, "application/json")

        return endpoint

    def of_run(request: Request, query: Query) -> Any:
        what = request.path_params["what"]
        if what not in OF_A_RUN:
            raise QueryRefusal(404, f"there is no {what[:80]} here; there is {', '.join(OF_A_RUN)}")
        return OF_A_RUN[what](api, api.run(request.path_params["run"]), query)

    def trajectory(request: Request, query: Query) -> Any:
        place = request.path_params
        return api.trajectory(api.run(place["run"]), place["file"], place["line"], query)

    def metrics(request: Request) -> Response:
        run = api.library.run(request.path_params["run"])
        if run is None:
            return refused(404, "there is no such run here")
        run.metrics.refresh()
        tag = f'"{run.metrics.state}"'
        if request.headers.get("if-none-match") == tag:
            return answer(b"", "application/json", 304, ETag=tag)
        response = route(lambda request, query: api.metrics(run, query))(request)
        response.headers["ETag"] = tag
        return response

    def page(request: Request) -> Response:
        if (given := request.query_params.get("token")) is None:
            return static("index.html")
        if not guard.is_token(given):
            return refused(401, "the token is wrong; open the URL that mtrl.view printed")
        return answer(b"", "text/plain", 303, **{"Location": "/", "Set-Cookie": guard.cookie_header()})

    def static(name: str) -> Response:
        path = STATIC / name
        if "/" in name or "\\" in name or path.suffix not in TYPES or not path.is_file():
            return refused(404, "there is no such page")
        return answer(path.read_bytes(), TYPES[path.suffix])

    def nothing(_: Request) -> Response:
        return refused(404, "there is no such page")

    @app.middleware("http")
    async def guarded(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        try:
            guard.check(request)
        except QueryRefusal as refusal:
            return refused(refusal.status, str(refusal))
        return await go_on(request)

    app.add_route("/api/runs", route(lambda request, query: api.runs(query)))
    app.add_route("/api/sweeps", route(lambda request, query: api.sweeps(query)))
    app.add_route("/api/changes", route(lambda request, query: api.changes(query)))
    app.add_route("/api/runs/{run}/metrics", metrics)
    app.add_route("/api/runs/{run}/trajectory/{file}/{line}", route(trajectory))
    app.add_route("/api/runs/{run}/{what}", route(of_run))
    app.add_route("/static/{name}", lambda request: static(request.path_params["name"]))
    app.add_route("/", page)
    app.add_route("/{rest:path}", nothing)
    return app
