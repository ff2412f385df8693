"""Reads the folder of an evaluation."""

import json


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def trajectories_of(folder):
    """Return the trajectories of every file, without the values that depend on time."""
    files = sorted((folder / "trajectories").glob("*.jsonl"))
    return {file.name: [_timeless(json.loads(line)) for line in file.read_text().splitlines()] for file in files}


def report_of(folder):
    """Return the report without its time."""
    return {key: value for key, value in json.loads((folder / "report.json").read_text()).items() if key != "created"}


def _timeless(value):
    if isinstance(value, dict):
        return {key: _timeless(item) for key, item in value.items() if not key.startswith("seconds")}
    return [_timeless(item) for item in value] if isinstance(value, list) else value
