"""Sweeps: many runs of one command, the outcome of each run, and the best run."""
