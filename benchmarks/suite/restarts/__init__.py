"""Costs of failures: restarts, resumes, and the useful part of the time."""
