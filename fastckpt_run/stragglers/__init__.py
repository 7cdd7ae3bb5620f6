"""Ranks that hold up the others: found from the windows of steps that all workers report."""
