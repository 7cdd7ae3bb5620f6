"""Costs of jobs on several hosts, real ones or simulated."""
