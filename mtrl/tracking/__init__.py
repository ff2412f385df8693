"""Records and displays of a run: run directory, metrics, console and curves."""
