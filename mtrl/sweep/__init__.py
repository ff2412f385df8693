"""Sweeps: many runs of one command, what became of each, and which was best."""
