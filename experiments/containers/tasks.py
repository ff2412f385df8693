"""Generated task folders: count the lines of a file of the image. All tasks share one image, which is built once."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from mtrl.environments.tool_calls import format_call
from mtrl.sandbox.container_image import build_image
from mtrl.types import Row
from tests.container_root import IMAGE

BUILD_SECONDS = 600.0
TOML = """
[environment]
docker_image = "{image}"
memory_mb = 64
workdir = "/app"
[verifier.env]
LINES = "{lines}"
"""
TEST = """#!/bin/bash
if [ "$(cat answer.txt)" = "$LINES" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


@dataclass(frozen=True)
class Task:
    """One task and the responses that solve it."""

    row: Row
    responses: tuple[str, ...]


def write_tasks(root: Path, count: int, engine: str) -> list[Task]:
    """Write `count` task folders, build their image with a container engine, and return the tasks."""
    rng = random.Random(0)
    lines = [rng.randrange(1, 1000) for _ in range(count)]
    image = build_image(engine, _image_folder(root / "image" / "environment", lines), BUILD_SECONDS)
    return [_write(root / f"count-{index}", index, image, number) for index, number in enumerate(lines)]


def _image_folder(folder: Path, lines: list[int]) -> Path:
    (folder / "data").mkdir(parents=True)
    for index, number in enumerate(lines):
        (folder / "data" / f"{index}.txt").write_text("line\n" * number)
    (folder / "Dockerfile").write_text(f"FROM {IMAGE}\nCOPY data /data\n")
    return folder


def _write(folder: Path, index: int, image: str, lines: int) -> Task:
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text(TOML.format(image=image, lines=lines))
    (folder / "instruction.md").write_text(f"Write the number of lines of /data/{index}.txt into answer.txt.")
    (folder / "tests" / "test.sh").write_text(TEST)
    commands = (f"head -n 3 /data/{index}.txt", f"wc -l < /data/{index}.txt > answer.txt", "cat answer.txt")
    calls = [format_call("bash", {"command": command}) for command in commands]
    row = {"id": folder.name, "prompt": [], "ground_truth": {"task": folder.name, "folder": str(folder)}}
    return Task(row, (*calls, "done"))
