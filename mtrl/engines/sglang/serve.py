"""Starts SGLang's server with its own arguments: `python -m mtrl.engines.sglang.serve --model-path …`.

This module runs inside the engine's environment. It adds to `sglang serve`: the token comes from the environment, so
that neither a command line nor a log shows it; the ranks meet on loopback; and PyTorch without CUDA is sufficient.
"""

from __future__ import annotations

import os
import sys

from mtrl.engines.sglang.access import TOKEN, Secret, meet_on_loopback
from mtrl.engines.sglang.platform import declare_operators

# The call is at module level, because SGLang's spawned processes import this module again.
declare_operators()
meet_on_loopback()


def main(arguments: list[str]) -> None:
    """Run the server until it ends."""
    if not os.environ.get(TOKEN):
        raise SystemExit(f"{TOKEN} is not set; it holds the token that every request must carry")
    token = Secret(os.environ.pop(TOKEN))

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    settings = prepare_server_args(arguments)
    settings.api_key = settings.admin_api_key = token
    try:
        run_server(settings)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
