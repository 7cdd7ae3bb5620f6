"""Runs in: worker. Activations on storage: hooks, scratch file, transfers, codecs."""
