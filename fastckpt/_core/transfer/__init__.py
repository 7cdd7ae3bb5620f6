"""Runs in: worker. Copies from host and device memory into mapped images."""
