"""Checkpoints: reading, writing and the index of the newest and best ones."""
