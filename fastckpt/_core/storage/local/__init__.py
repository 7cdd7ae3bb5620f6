"""Runs in: both. Checkpoints in a directory of a file system."""
