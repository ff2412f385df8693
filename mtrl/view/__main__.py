"""mtrl view: show runs and their trajectories in the browser.

    mtrl view outputs/gsm8k/RUN              show one run, which may still be running
    mtrl view outputs                        show all runs below a folder, side by side
    mtrl view RUN OTHER_RUN                  show these runs
    mtrl view RUN --export run.html          write one file to send to others, which needs no server

By default, only this machine can reach the page. Its URL holds a token: MTRL_VIEW_TOKEN if set, else a random one.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from mtrl.command.program import run_program
from mtrl.errors import UserError
from mtrl.record.library import Library
from mtrl.utils.serving import is_loopback
from mtrl.view.http_api import Api

TOKEN_VARIABLE = "MTRL_VIEW_TOKEN"
SHORTEST_TOKEN = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Find the runs, and serve or export them. Return the exit status."""
    args = parse(argv)
    check(args)
    api = Api(Library([Path(run) for run in args.runs]))
    for warning in api.library.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if args.export is not None:
        from mtrl.view.export import export

        print(export(api, Path(args.export), args.max_trajectories))
        return 0
    return serve(api, args.host, args.port, opens_browser=not args.no_browser and has_display())


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mtrl view", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the folder of a run, or one that holds runs")
    parser.add_argument("--port", type=int, help="default: a free one")
    parser.add_argument("--host", default="127.0.0.1", help="another address than this machine's own needs a token")
    parser.add_argument("--no-browser", action="store_true", help="only print the URL")
    parser.add_argument("--export", metavar="FILE.html", help="write one HTML file instead of serving")
    parser.add_argument("--max-trajectories", type=int, metavar="N", help="in the exported file; default: 200")
    return parser.parse_args(argv)


def check(args: argparse.Namespace) -> None:
    """Check the options, and fill in the default of `--max-trajectories`.

    Raises:
        UserError: Options contradict each other, or have no effect.
    """
    if args.export is None:
        if args.max_trajectories is not None:
            raise UserError(
                "--max-trajectories applies only to an exported file; add --export FILE.html or leave it out"
            )
    else:
        if args.port is not None or args.host != "127.0.0.1" or args.no_browser:
            raise UserError("--export writes a file and serves nothing; leave out --host, --port and --no-browser")
        if args.max_trajectories is not None and args.max_trajectories < 0:
            raise UserError(f"--max-trajectories {args.max_trajectories} must be at least 0")
        args.max_trajectories = 200 if args.max_trajectories is None else args.max_trajectories
    if not is_loopback(args.host) and not os.environ.get(TOKEN_VARIABLE):
        raise UserError(f"--host {args.host} is open to others; set {TOKEN_VARIABLE} to a token, or leave it out")


def token() -> str:
    """Return the token of the user, or a new random one.

    Raises:
        UserError: The token is too short, or has characters that a cookie cannot hold.
    """
    given = os.environ.get(TOKEN_VARIABLE)
    if not given:
        return secrets.token_urlsafe(24)
    if len(given) < SHORTEST_TOKEN or not given.replace("-", "").replace("_", "").isalnum() or not given.isascii():
        raise UserError(f"{TOKEN_VARIABLE} must have at least {SHORTEST_TOKEN} letters, digits, - or _")
    return given


def serve(api: Api, host: str, port: int | None, opens_browser: bool) -> int:
    """Serve until Ctrl-C. Return the exit status."""
    from mtrl.utils.serving import address_of, bind
    from mtrl.utils.serving import serve as run_server
    from mtrl.view.server import Guard, create_app

    word = token()
    bound = bind(host, port or 0, word, TOKEN_VARIABLE)
    address = address_of(bound)
    url = f"{address}/?token={word}"

    def ready() -> None:
        number = len(api.library.runs)
        print(f"{number} run{'s' if number != 1 else ''} at {url}", flush=True)
        print("Ctrl-C ends it", flush=True)
        if opens_browser:
            webbrowser.open(url)

    run_server(create_app(api, Guard(host, bound.getsockname()[1], word)), bound, ready)
    return 0


def has_display() -> bool:
    """Whether a browser can be shown."""
    return sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def cli(argv: Sequence[str] | None = None) -> None:
    run_program(main, argv)


if __name__ == "__main__":
    cli()
