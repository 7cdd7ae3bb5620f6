"""Runs in: agent. Detection of lost nodes: agents watch their neighbours in a ring, and report a loss to all others."""
