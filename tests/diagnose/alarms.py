"""Reads alarms.jsonl of a run."""

import json
from contextlib import suppress

from mtrl.diagnose.finding import Finding


def read_alarms(run):
    """Return the findings of the live diagnosis of a run, each with its step, without unreadable lines."""
    path, found = run.path / "alarms.jsonl", []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with suppress(ValueError):  # an incomplete line, after a kill
            data = json.loads(line)
            found.append((int(data.pop("step")), Finding.from_dict(data)))
    return found
