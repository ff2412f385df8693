"""Pay and score stored trajectories anew, without a model: `python -m mtrl.rescore`."""
