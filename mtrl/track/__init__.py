"""python -m mtrl.track: send the records of a run to its trackers."""
