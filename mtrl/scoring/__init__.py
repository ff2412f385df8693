"""Success on held-out rows: measures, agreement of reward and scorer, pass@k and statistics."""
