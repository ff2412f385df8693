"""Viewer of runs and trajectories as a local web page: `mtrl view`."""
