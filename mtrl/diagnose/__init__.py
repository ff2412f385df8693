"""What is wrong with a run, and the first thing to change: `python -m mtrl.diagnose RUN`, and live in training."""
