"""python -m mtrl.track: send what a run has recorded to its trackers."""
