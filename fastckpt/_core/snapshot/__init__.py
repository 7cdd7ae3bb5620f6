"""Runs in: worker. A save to memory: plan, copy, commit, partly overlapped with training."""
