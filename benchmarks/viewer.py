"""Seconds until the viewer shows a long run, and seconds of its lists and its search.

    python benchmarks/viewer.py                              50,000 trajectories of 8 turns with 60 tokens each
    python benchmarks/viewer.py --trajectories 5000          fewer trajectories

The run is made from a seed. Times are wall seconds over HTTP, from the start of the process to the first page of
trajectories, with and without the indexes in the folder.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from bounds import check_sizes

from mtrl.record.trajectories import index_path, write_groups
from mtrl.types import FinishReason, Group, StopReason, Trajectory, Turn

GROUP = 8
GROUPS_PER_STEP = 16
TOKEN = "benchmark-of-the-viewer"
WORDS = [
    "count",
    "the",
    "apples",
    "in",
    "a",
    "box",
    "and",
    "tell",
    "how",
    "many",
    "are",
    "left",
    "when",
    "some",
    "were",
    "sold",
]
RARE = "needle in the haystack"
LISTS = {
    "newest first": {},
    "by reward": {"sort": "reward"},
    "disagreements": {"verdict": "disagree"},
    "one task, by tokens": {"task": "task-7", "sort": "tokens"},
    "last page": {"offset": "last"},
}


def make_run(folder: Path, trajectories: int, turns: int, tokens: int, seed: int) -> Path:
    """Write a run with `trajectories` trajectories, 128 of them in each step, and their indexes."""
    run = folder / "run"
    (run / "trajectories").mkdir(parents=True)
    rng = random.Random(seed)
    steps = math.ceil(trajectories / (GROUP * GROUPS_PER_STEP))
    left = trajectories
    for step in range(1, steps + 1):
        groups = []
        for number in range(min(GROUPS_PER_STEP, math.ceil(left / GROUP))):
            size = min(GROUP, left)
            left -= size
            task = f"task-{rng.randrange(500)}"
            members = [trajectory(rng, task, f"step{step}/{number}", n, turns, tokens, step) for n in range(size)]
            groups.append(Group(f"step{step}/{number}", {}, members))
        write_groups(run / "trajectories", "train", step, groups)
    rows = ({"step": step, "rollout/reward/mean": rng.random(), "train/loss": rng.gauss(0, 1)} for step in range(steps))
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = {"name": "benchmark", "seed": seed, "trainer": {"max_steps": steps}}
    (run / "config.yaml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    return run


def trajectory(rng: random.Random, task: str, group: str, index: int, turns: int, tokens: int, step: int) -> Trajectory:
    made = [turn(rng, tokens, step) for _ in range(turns)]
    made[-1].reward = float(rng.random() < 0.5)
    score = made[-1].reward if rng.random() < 0.95 else 1.0 - made[-1].reward
    return Trajectory(task, group, index, made, StopReason.DONE, score=score)


def turn(rng: random.Random, tokens: int, step: int) -> Turn:
    logprobs = [-rng.expovariate(2.0) for _ in range(tokens)]
    text = " ".join(rng.choices(WORDS, k=tokens)) + (f" {RARE}" if rng.random() < 0.001 else "")
    return Turn(
        observation_ids=[rng.randrange(400) for _ in range(tokens // 2)],
        action_ids=[rng.randrange(400) for _ in range(tokens)],
        action_logprobs=logprobs,
        version_spans=[(step, tokens)],
        finish=FinishReason.STOP,
        text=text,
        message={"role": "assistant", "content": text},
        observation=[{"role": "user", "content": " ".join(rng.choices(WORDS, k=tokens // 2))}],
        components={"correct": 0.0},
        advantages=[rng.gauss(0, 1)],
        trainer_logprobs=[value + rng.gauss(0, 1e-3) for value in logprobs],
    )


@contextmanager
def viewer(run: Path) -> Iterator[tuple[httpx.Client, float]]:
    """Start a viewer, and yield a client of it and the time of its start."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "mtrl.view", str(run), "--no-browser"]
    environment = {**os.environ, "MTRL_VIEW_TOKEN": TOKEN}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            line = process.stdout.readline() if process.stdout else ""
            url = line.rpartition(" at ")[2].partition("/?")[0]
            with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=120) as client:
                yield client, start
        finally:
            process.terminate()


def measure_opening(run: Path) -> dict[str, float]:
    """Return the seconds from the start of the process to the page, to its list of runs, to its first list of
    trajectories, and to the end of the indexing; and the total CPU seconds of the viewer, which other work on the
    machine hardly changes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with viewer(run) as (client, start):
        seconds = {}
        client.get("/").raise_for_status()
        seconds["page"] = time.perf_counter() - start
        run_id = client.get("/api/runs").json()["runs"][0]["id"]
        seconds["runs"] = time.perf_counter() - start
        first = client.get(f"/api/runs/{run_id}/trajectories").json()
        seconds["first list"] = time.perf_counter() - start
        seconds["rows in it"] = float(first["total"])
        while True:
            indexing = client.get("/api/changes").json()["runs"][0]["indexing"]
            if indexing["done"] == indexing["total"]:
                break
            time.sleep(0.2)
        seconds["all lists"] = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {**seconds, "CPU": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def measure_lists(run: Path, repeats: int) -> dict[str, tuple[float, float]]:
    """Return the seconds of the first request and the median of further requests for each list. The viewer caches a
    list after the first request, so that further requests get other pages."""
    found = {}
    with viewer(run) as (client, _):
        base = f"/api/runs/{client.get('/api/runs').json()['runs'][0]['id']}"
        total = client.get(f"{base}/trajectories").json()["total"]
        for name, words in LISTS.items():
            times = []
            for number in range(repeats + 1):
                offset = max(0, total - 100) if words.get("offset") == "last" else 100 * number
                times.append(timed(client, f"{base}/trajectories", {**words, "offset": offset}))
            found[name] = (times[0], median(times[1:]))
        for route in ("files", "groups", "facets", "metrics"):
            times = [timed(client, f"{base}/{route}", {}) for _ in range(repeats + 1)]
            found[route] = (times[0], median(times[1:]))
        times = [timed(client, f"{base}/trajectory/train_step_000001/{number}", {}) for number in range(repeats + 1)]
        found["one trajectory"] = (times[0], median(times[1:]))
    return found


def timed(client: httpx.Client, path: str, words: dict[str, Any]) -> float:
    start = time.perf_counter()
    client.get(path, params=words).raise_for_status()
    return time.perf_counter() - start


def measure_search(run: Path, texts: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return for each text the seconds to the first match and to the end, and the numbers of matches and requests."""
    found = {}
    with viewer(run) as (client, _):
        base = f"/api/runs/{client.get('/api/runs').json()['runs'][0]['id']}"
        client.get(f"{base}/trajectories").raise_for_status()
        for text in texts:
            found[text] = search_all(client, f"{base}/search", text)
    return found


def search_all(client: httpx.Client, path: str, text: str) -> dict[str, float]:
    start, found, requests, first = time.perf_counter(), 0, 0, math.nan
    words: dict[str, Any] = {"q": text, "limit": 500}
    while words.get("cursor", "") is not None:
        answer = client.get(path, params=words).json()
        requests += 1
        if answer["items"] and not found:
            first = time.perf_counter() - start
        found += len(answer["items"])
        words["cursor"] = answer["cursor"]
    return {"first": first, "all": time.perf_counter() - start, "found": found, "requests": requests}


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Make a run, measure the viewer with it, and return the results as JSON values."""
    start = time.perf_counter()
    run = make_run(folder, args.trajectories, args.turns, args.tokens, args.seed)
    made = time.perf_counter() - start
    files = sorted((run / "trajectories").glob("*.jsonl"))
    indexes = [index_path(path) for path in files]
    result: dict[str, Any] = {
        "make_s": made,
        "files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
        "index_bytes": sum(path.stat().st_size for path in indexes),
        "with": measure_opening(run),
        "lists": measure_lists(run, args.repeats),
        "search": measure_search(run, (RARE, "nowhere at all")),
    }
    for path in indexes:
        path.unlink()
    return {**result, "without": measure_opening(run), "after": measure_opening(run)}


def table(args: argparse.Namespace, result: dict[str, Any]) -> str:
    size = f"{result['bytes'] / 1e6:,.0f} MB in {result['files']} files, indexes {result['index_bytes'] / 1e6:,.1f} MB"
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}, load average {os.getloadavg()[0]:.1f}"
    columns = ("page", "runs", "first list", "rows in it", "all lists", "CPU")
    lines = [
        f"{args.trajectories:,} trajectories of {args.turns} turns with {args.tokens} tokens: {size}",
        f"{machine}; made in {result['make_s']:.0f} s",
        "",
        f"{'seconds from the start of the process':<40}" + "".join(f"{name:>12}" for name in columns),
    ]
    for name, key in (("indexes present", "with"), ("indexes absent", "without"), ("opened once more", "after")):
        cells = (f"{result[key][c]:>12,.0f}" if c == "rows in it" else f"{result[key][c]:>12.2f}" for c in columns)
        lines.append(f"{name:<40}" + "".join(cells))
    lines += ["", f"{'milliseconds of a request':<40}{'first':>12}{'further':>12}"]
    lines += [f"{name:<40}{1e3 * a:>12.0f}{1e3 * b:>12.1f}" for name, (a, b) in result["lists"].items()]
    lines += ["", f"{'seconds of a search':<40}{'first match':>12}{'all':>12}{'matches':>12}{'requests':>12}"]
    for text, found in result["search"].items():
        lines.append(
            f"{text:<40}{found['first']:>12.2f}{found['all']:>12.2f}{found['found']:>12,}{found['requests']:>12}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=50_000)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=60, help="sampled tokens per turn, half as many observed")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to this file")
    args = parser.parse_args(argv)
    check_sizes(parser, args, seed=0)
    with tempfile.TemporaryDirectory(prefix="mtrl-") as folder:
        result = measure(Path(folder), args)
    print(table(args, result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
