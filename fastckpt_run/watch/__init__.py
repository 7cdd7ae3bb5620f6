"""Runs in: agent. A job while it runs: its metrics, and messages about it between the agents of its nodes."""
