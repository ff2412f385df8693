"""Turns trajectories into mini-batches: admission, the stream of groups, samples and batches."""
