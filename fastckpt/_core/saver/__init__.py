"""Runs in: agent. The owner of shared memory: which slot a save takes, what is committed, what is durable."""
