"""Evaluation of any model on a fixed held-out split, as in a run: `python -m mtrl.evaluate`."""
