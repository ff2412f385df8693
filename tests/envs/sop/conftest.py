"""Rows, episodes and a folder in SOP-Bench's format for the tests of the procedures."""

import asyncio
import csv
import json

import pytest

from envs.sop import FAMILY
from mtrl.config.schema import DataConfig
from tests.envs.episodes import trajectory_of


def play_responses(row, responses, **settings):
    """Return the step results of an episode up to its end, and close the environment."""
    return asyncio.run(play_async(row, responses, **settings))


async def play_async(row, responses, **settings):
    environment = FAMILY.environment(**settings)
    try:
        environment.reset(row)
        results = []
        for response in responses:
            results.append(await environment.step(response, row["ground_truth"]))
            if results[-1].done:
                break
        return results
    finally:
        environment.close()


# Session fixtures that return functions, because hypothesis does not support fixtures of one test.


@pytest.fixture(scope="session")
def play():
    return play_responses


@pytest.fixture(scope="session")
def play_at_once():
    return play_async


@pytest.fixture(scope="session")
def score():
    """Return the success of these responses, by the scorer."""
    return lambda responses, row: FAMILY.score(trajectory_of(responses), row)


@pytest.fixture(scope="session")
def splits():
    return FAMILY.load(DataConfig(), seed=0)


@pytest.fixture(scope="session")
def by_domain(splits):
    """The held-out rows of each domain."""
    found = {}
    for row in splits.test:
        found.setdefault(row["domain"], []).append(row)
    return found


TOOLS = """
import csv, os, random

print("this is no result")


class DoorManager:
    def __init__(self):
        folder = os.path.dirname(os.path.abspath(__file__))
        with open(os.path.join(folder, "test_set_with_outputs.csv")) as file:
            self.rows = {row["door_id"]: row for row in csv.DictReader(file)}

    def lookAtDoor(self, door_id, floor=None):
        return {"state": self.rows[door_id]["state"], "floor": floor, "noise": random.random()}

    def countKeys(self, door_id, key_ring):
        return int(self.rows[door_id]["keys"]) if isinstance(key_ring, list) else float("nan")

    def process_tool_call(self, name, arguments):
        if name not in ("lookAtDoor", "countKeys"):
            raise ValueError("no such tool")
        return getattr(self, name)(**arguments)
"""
SPECS = [
    {
        "toolSpec": {
            "name": "lookAtDoor",
            "description": "Look at a door.",
            "inputSchema": {
                "json": {
                    "type": "object",
                    "properties": {"door_id": {"type": "string"}, "floor": {"type": "integer"}},
                    "required": ["door_id"],
                }
            },
        }
    },
    {
        "toolSpec": {
            "name": "countKeys",
            "description": "Count the keys.",
            "inputSchema": {
                "json": {
                    "type": "object",
                    "properties": {"door_id": {"type": "string"}, "key_ring": {"type": "array"}},
                    "required": ["door_id", "key_ring"],
                }
            },
        }
    },
    {
        "toolSpec": {
            "name": "askPorter",
            "description": "Ask the porter.",
            "inputSchema": {
                "json": {"type": "object", "properties": {"question": {"type": "string"}}, "required": ["question"]}
            },
        }
    },
]
CASES = [
    {"door_id": "D1", "floor": "2", "key_ring": "['a', 'b']", "state": "Open", "keys": "2"},
    {"door_id": "D2", "floor": "0", "key_ring": "[]", "state": "Shut", "keys": "0"},
]


@pytest.fixture
def folder(tmp_path):
    """A folder about doors in SOP-Bench's format, with the mismatch that the guide describes."""
    folder = tmp_path / "doors"
    folder.mkdir()
    (folder / "sop.txt").write_text("Look at the door. End with <final_response>{'state': 'Open'}</final_response>\n")
    (folder / "tools.py").write_text(TOOLS)
    (folder / "toolspecs.json").write_text(json.dumps(SPECS))
    columns = {"input_columns": ["door_id", "floor", "key_ring"], "output_columns": ["state", "keys"]}
    (folder / "metadata.json").write_text(json.dumps(columns))
    for name, left_out in (("with", ()), ("without", ("state", "keys"))):
        with (folder / f"test_set_{name}_outputs.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, [n for n in CASES[0] if n not in left_out], extrasaction="ignore")
            writer.writeheader()
            writer.writerows(CASES)
    return folder
