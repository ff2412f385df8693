"""Figures of runs, fit for a paper: `python -m mtrl.figures`."""
