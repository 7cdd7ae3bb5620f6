"""Runs in: both. Checkpoints as objects of a store that fsspec opens."""
