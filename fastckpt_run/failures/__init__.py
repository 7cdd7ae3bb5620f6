"""Runs in: agent. Failures of workers: the dead process, the cause, the decision to start again, and the report."""
