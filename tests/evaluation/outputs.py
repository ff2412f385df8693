"""Reading the folder of an evaluation."""

import json


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def trajectories_of(folder):
    """Of every file, without what a clock decides."""
    files = sorted((folder / "trajectories").glob("*.jsonl"))
    return {file.name: [_timeless(json.loads(line)) for line in file.read_text().splitlines()] for file in files}


def report_of(folder):
    """Without the time at which it was made."""
    return {key: value for key, value in json.loads((folder / "report.json").read_text()).items() if key != "created"}


def _timeless(value):
    if isinstance(value, dict):
        return {key: _timeless(item) for key, item in value.items() if not key.startswith("seconds")}
    return [_timeless(item) for item in value] if isinstance(value, list) else value
