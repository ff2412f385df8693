"""Figures of runs in the quality of a paper: `mtrl figures`."""
