"""Runs in: both. Reading event logs: launches, failures, and where the time of a job went."""
