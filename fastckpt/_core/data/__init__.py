"""Runs in: worker. Where a job is in its data: positions, shares of ranks, generators."""
