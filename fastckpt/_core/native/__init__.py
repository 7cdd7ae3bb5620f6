"""Runs in: worker. Checkpoints in files that a framework lays out by itself."""
