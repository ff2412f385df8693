"""Evaluate any model on a fixed held-out split, as a run does: `python -m mtrl.evaluate`."""
