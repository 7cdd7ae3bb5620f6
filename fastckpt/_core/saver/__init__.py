"""Runs in: agent. The owner of shared memory: the slot that a save takes, committed saves, durable checkpoints."""
