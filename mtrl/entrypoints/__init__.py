"""Names under which other documents start a run."""
