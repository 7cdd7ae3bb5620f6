"""Runs in: worker. A resume: candidates, verification, the vote of all ranks, the load."""
