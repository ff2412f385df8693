"""Diagnosis of a run: symptoms and the first thing to change, by `python -m mtrl.diagnose RUN` and live in training."""
