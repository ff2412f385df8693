"""From trajectories to mini-batches: admission, the stream of groups, samples and batches."""
