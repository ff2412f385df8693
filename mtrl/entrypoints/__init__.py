"""Module names by which other documents start a run."""
