"""Runs in: both. Durable places for checkpoints: a directory, or objects at a URL."""
