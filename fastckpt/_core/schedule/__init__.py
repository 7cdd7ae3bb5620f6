"""Runs in: worker. The schedule of saves: measurements of a running job, and the intervals that follow from them."""
