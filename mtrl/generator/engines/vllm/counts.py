"""How many requests a vLLM server samples and how many wait, as JSON; vLLM has it only in Prometheus' format, and
stale while it is paused.

Runs inside the engine's environment, as ASGI middleware.
"""

from __future__ import annotations

from mtrl.generator.engines.vllm.gate import App, Receive, Scope, Send, answer

PATH = "/mtrl/requests"
RUNNING = "vllm:num_requests_running"


class Counts:
    """Answers `GET /mtrl/requests` with `{"running": …, "waiting": …}`."""

    def __init__(self, app: App):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        client = scope["app"].state.engine_client
        known = client.output_processor.get_num_unfinished_requests()
        running = min(running_requests(), known)
        await answer(send, 200, {"running": running, "waiting": known - running})


def running_requests() -> int:
    """As the scheduler told after its last step."""
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    samples = (s for metric in get_prometheus_registry().collect() if metric.name == RUNNING for s in metric.samples)
    return int(sum(sample.value for sample in samples))
