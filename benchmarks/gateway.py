"""Latency that the gateway adds to a call, and number of calls per second that it answers.

    python benchmarks/gateway.py                       500 trajectories of 10 calls, each sampled for 2 s
    python benchmarks/gateway.py --trajectories 100    fewer trajectories

All trajectories run at the same time, each over its own connection, with a scripted engine that takes a fixed time for
every turn. In the plan `paced` they start spread evenly over that time, since programs of different speed soon spread
like this. Added latency is the time that the client measured minus the fixed time of the engine. Client and gateway are
two processes. In the plan `burst` the engine takes no time and all trajectories start together, which shows the
greatest number of calls per second.

The floor is an ASGI application that reads the same bodies, sleeps for the same time and answers with the same text, on
the same server with the same settings. Only the ratio of gateway to floor in one run is reliable, since other work on
the machine changes the milliseconds.

The exit status is 1 if an answer was lost or belonged to another trajectory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gateway_client
import uvicorn
from bounds import check_sizes
from gateway_client import WORDS, Plan, answer_of

from mtrl.engines.base import SamplingParams
from mtrl.engines.scripted import ScriptedEngine
from mtrl.gateway.exchange import Reply, read_json
from mtrl.gateway.server import Gateway
from mtrl.gateway.session import Session, SessionLimits
from mtrl.models.renderer import make_renderer
from mtrl.models.tiny import train_tokenizer
from mtrl.rollout.conversation import Codec
from mtrl.types import Generation
from mtrl.utils.process import settled

MODES = ("gateway", "floor")
LIMIT = 600
"""Time limit of one measurement, in seconds."""


class SlowEngine(ScriptedEngine):
    """Takes a fixed time for each turn, and records the real time."""

    def __init__(self, tokenizer: Any, seconds: float):
        super().__init__(answer_of, tokenizer)
        self.seconds = seconds
        self.took: list[float] = []

    async def generate(self, trajectory_id: str, prompt: list[int], sampling: SamplingParams) -> Generation:
        start = time.perf_counter()
        await pause(self.seconds)
        generation = await super().generate(trajectory_id, prompt, sampling)
        self.took.append(time.perf_counter() - start)
        return generation


async def pause(seconds: float) -> None:
    if seconds:
        await asyncio.sleep(seconds)


async def ask(urls: dict[str, str], plan: Plan) -> dict[str, Any]:
    """Run the client process, and return its results."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, gateway_client.__file__, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    job = json.dumps({"plan": vars(plan), "urls": urls}).encode()
    try:
        async with asyncio.timeout(LIMIT):
            out, _ = await process.communicate(job)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return json.loads(out)


async def measure_gateway(plan: Plan, codec: Codec) -> dict[str, Any]:
    engine = SlowEngine(codec.tokenizer, plan.delay)
    limits = SessionLimits(max_calls=plan.calls, max_calls_at_once=1, max_context_length=1 << 20)
    gateway = Gateway(engine, codec, limits)
    await gateway.start()
    try:
        sampling = SamplingParams(stop_token_ids=codec.stop_token_ids)
        sessions = {name: gateway.open(name, sampling) for name in plan.names}
        asked = await ask({name: gateway.base_url(session) for name, session in sessions.items()}, plan)
        found = summary(asked, plan, engine.took)
        found["whole_trajectories"] = sum(is_whole(session, plan) for session in sessions.values())
        return found
    finally:
        await gateway.close()


def is_whole(session: Session, plan: Plan) -> bool:
    """Whether the session has all turns, each with its own text and each extending the turn before."""
    turns = session.turns()
    mine = [turn.text.strip() == answer_of(session.name, n).strip() for n, turn in enumerate(turns)]
    return len(turns) == plan.calls and all(mine) and all(turn.break_reason is None for turn in turns)


async def measure_floor(plan: Plan, codec: Codec) -> dict[str, Any]:
    took: list[float] = []
    spoken: dict[str, int] = {}

    async def echo(scope: Any, receive: Any, send: Any) -> None:
        await read_json(scope, receive, 8 << 20)
        start = time.perf_counter()
        await pause(plan.delay)
        took.append(time.perf_counter() - start)
        name = scope["path"].split("/")[2]
        turn = spoken[name] = spoken.get(name, -1) + 1
        message = {"role": "assistant", "content": answer_of(name, turn)}
        await Reply({"choices": [{"index": 0, "message": message}]}).send(receive, send)

    class Floor(Gateway):
        def _config(self) -> uvicorn.Config:
            config = super()._config()
            config.app = echo
            return config

    floor = Floor(SlowEngine(codec.tokenizer, 0.0), codec, SessionLimits(1, 1, 1))
    await floor.start()
    try:
        return summary(await ask({name: f"{floor.url}/t/{name}" for name in plan.names}, plan), plan, took)
    finally:
        await floor.close()


def summary(asked: dict[str, Any], plan: Plan, took: Sequence[float]) -> dict[str, Any]:
    calls = asked["calls"]
    added = sorted(call["s"] - plan.delay for call in calls)
    late = sorted(seconds - plan.delay for seconds in took)
    return {
        "calls": len(calls),
        "lost": plan.trajectories * plan.calls - sum(call["status"] == 200 for call in calls),
        "mixed": sum(call["status"] == 200 and not call["is_mine"] for call in calls),
        "requests_per_s": len(calls) / asked["wall_s"],
        "added_ms": {str(q): 1e3 * quantile(added, q / 100) for q in (50, 90, 99, 100)},
        "engine_late_ms": {str(q): 1e3 * quantile(late, q / 100) for q in (50, 99)},
    }


def quantile(values: Sequence[float], q: float) -> float:
    """Return a quantile of sorted values."""
    return values[min(len(values) - 1, math.ceil(q * len(values)) - 1 if q else 0)] if values else math.nan


def make_codec() -> Codec:
    corpus = [[{"role": "user", "content": WORDS * 3}, {"role": "assistant", "content": f"trajectory turn {WORDS}"}]]
    tokenizer = train_tokenizer(corpus * 4, 340, ())
    return Codec(tokenizer, make_renderer(tokenizer))


def measure(args: argparse.Namespace, codec: Codec) -> dict[str, Any]:
    """Measure gateway and floor with both plans in each round, in the opposite order in every second round."""
    plans = {
        "paced": Plan(args.trajectories, args.calls, args.delay, args.delay),
        "burst": Plan(args.trajectories, args.calls, 0.0, 0.0),
    }
    ways = {"gateway": measure_gateway, "floor": measure_floor}
    found: dict[str, Any] = {plan: {mode: [] for mode in MODES} for plan in plans}
    for number in range(args.rounds):
        for name, plan in plans.items():
            for mode in MODES if number % 2 == 0 else MODES[::-1]:
                before = time.process_time()
                result = asyncio.run(ways[mode](plan, codec))
                cpu = time.process_time() - before
                found[name][mode].append({**result, "cpu_ms_per_call": 1e3 * cpu / max(1, result["calls"])})
    return found


def table(args: argparse.Namespace, found: dict[str, Any], before: tuple[float, ...]) -> str:
    load = f"load average {before[0]:.1f} before and {os.getloadavg()[0]:.1f} after"
    lines = [
        f"{args.trajectories} trajectories of {args.calls} calls, {args.delay:g} s of sampling for each",
        f"{os.cpu_count()} cores, Python {platform.python_version()}, uvicorn {uvicorn.__version__}; {load}",
        "",
        f"{'':<16}{'calls/s':>9}{'added ms: p50':>15}{'p90':>9}{'p99':>9}{'max':>9}{'CPU ms/call':>13}"
        f"{'lost':>7}{'mixed':>7}",
    ]
    for plan, modes in found.items():
        for mode, rounds in modes.items():
            for result in rounds:
                added = "".join(f"{value:>{15 if q == '50' else 9}.1f}" for q, value in result["added_ms"].items())
                lines.append(
                    f"{plan + ', ' + mode:<16}{result['requests_per_s']:>9.0f}{added}{result['cpu_ms_per_call']:>13.2f}"
                    f"{result['lost']:>7}{result['mixed']:>7}"
                )
    return "\n".join(lines)


def is_sound(args: argparse.Namespace, found: dict[str, Any]) -> bool:
    results = [result for modes in found.values() for rounds in modes.values() for result in rounds]
    whole = [result.get("whole_trajectories", args.trajectories) for result in results]
    return all(r["lost"] == r["mixed"] == 0 for r in results) and all(count == args.trajectories for count in whole)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=500)
    parser.add_argument("--calls", type=int, default=10, help="calls of each trajectory")
    parser.add_argument("--delay", type=float, default=2.0, help="seconds of sampling for a turn")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to this file")
    args = parser.parse_args(argv)
    check_sizes(parser, args, delay=0)
    before = os.getloadavg()
    codec = make_codec()
    with settled():  # as the program of the gateway does
        found = measure(args, codec)
    print(table(args, found, before))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    sound = is_sound(args, found)
    print("" if sound else "answers were lost, or belonged to another trajectory", end="" if sound else "\n")
    return 0 if sound else 1


if __name__ == "__main__":
    raise SystemExit(main())
