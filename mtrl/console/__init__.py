"""What a run prints: the banner, one line per step, progress bars and shown episodes."""
