"""Runs in: worker. When to save: measurements of a running job, and the intervals that follow from them."""
