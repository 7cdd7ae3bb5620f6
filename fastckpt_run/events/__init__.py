"""Runs in: agent. The record of a job's events: a bounded log in memory, a file, the summary at the end."""
