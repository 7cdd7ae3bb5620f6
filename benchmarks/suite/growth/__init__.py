"""Costs as things grow."""
