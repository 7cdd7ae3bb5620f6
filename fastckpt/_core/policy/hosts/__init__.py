"""Runs in: pure. Hosts of a job: which of them is better left out."""
