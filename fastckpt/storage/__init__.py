"""Durable places for checkpoints."""
