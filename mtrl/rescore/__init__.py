"""Recompute the rewards and scores of stored trajectories without a model: `mtrl rescore`."""
