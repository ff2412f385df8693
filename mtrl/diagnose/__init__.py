"""Diagnosis of a run: symptoms and the first thing to change, by `mtrl diagnose RUN` and live in training."""
