"""Runs in: pure. The meaning of bytes: ids, manifests and the layout of files."""
