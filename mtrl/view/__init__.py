"""Viewer of runs and trajectories as a local web page: `python -m mtrl.view`."""
