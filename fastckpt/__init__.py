"""Shared-memory checkpoints for PyTorch."""
