"""Runs in: pure. Hosts of a job: the choice of ones to leave out."""
