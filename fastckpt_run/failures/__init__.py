"""Runs in: agent. Failures of workers: what died, why, whether to start again, and how it is reported."""
