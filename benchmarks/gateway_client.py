"""Client process of `gateway.py`: many concurrent conversations over plain sockets.

It uses no HTTP library, whose time would be measured too. It reads its job from stdin and writes the outcome of every
call to stdout.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass
from typing import Any

WORDS = "count the apples in a box and tell how many are left when some were sold . "


def answer_of(name: str, turn: int) -> str:
    return f"{name} turn {turn} " + WORDS * 2


def question_of(name: str, turn: int) -> str:
    return f"{name} asks {turn} " + WORDS * 4


@dataclass(frozen=True)
class Plan:
    """Sizes and times of one measurement."""

    trajectories: int
    calls: int
    delay: float
    """Seconds that the engine takes for each turn."""
    spread: float
    """Seconds over which the starts of the trajectories are spread."""

    @property
    def names(self) -> list[str]:
        return [f"trajectory-{number}" for number in range(self.trajectories)]


async def converse(url: str, name: str, plan: Plan, start: float) -> list[dict[str, Any]]:
    """Make all calls of one trajectory. Return for each its seconds, its status, and whether it got its own answer."""
    host, _, port = url.removeprefix("http://").partition("/")[0].rpartition(":")
    path = "/" + url.removeprefix("http://").partition("/")[2]
    await asyncio.sleep(max(0.0, start - time.perf_counter()))
    reader, writer = await asyncio.open_connection(host, int(port))
    messages, found = [], []
    try:
        for turn in range(plan.calls):
            messages.append({"role": "user", "content": question_of(name, turn)})
            body = json.dumps({"model": "mtrl", "messages": messages}).encode()
            head = f"POST {path}/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
            request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
            began = time.perf_counter()
            writer.write(request)
            status, content = await read_response(reader)
            took = time.perf_counter() - began
            message = json.loads(content)["choices"][0]["message"] if status == 200 else {"content": ""}
            is_mine = message["content"].strip() == answer_of(name, turn).strip()
            found.append({"s": took, "status": status, "is_mine": is_mine})
            messages.append({"role": "assistant", "content": message["content"]})
    finally:
        writer.close()
    return found


async def read_response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
    length = next(int(line.partition(":")[2]) for line in head if line.startswith("content-length:"))
    return int(head[0].split()[1]), await reader.readexactly(length)


async def converse_all(job: dict[str, Any]) -> list[dict[str, Any]]:
    plan = Plan(**job["plan"])
    start = time.perf_counter() + 0.2
    step = plan.spread / plan.trajectories
    talks = (converse(url, name, plan, start + step * n) for n, (name, url) in enumerate(job["urls"].items()))
    results = await asyncio.gather(*talks, return_exceptions=True)
    return [call for calls in results if isinstance(calls, list) for call in calls]


def main() -> None:
    job = json.load(sys.stdin)
    start = time.perf_counter()
    calls = asyncio.run(converse_all(job))
    json.dump({"wall_s": time.perf_counter() - start, "calls": calls}, sys.stdout)


if __name__ == "__main__":
    main()
