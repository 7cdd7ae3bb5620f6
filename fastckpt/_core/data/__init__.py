"""Runs in: worker. The position of a job in its data: positions, shares of ranks, generators."""
