"""Figures of runs in the quality of a paper: `python -m mtrl.figures`."""
