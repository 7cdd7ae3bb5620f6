"""Runs in: agent. Detection of workers that hang, and of the rank that is to blame."""
