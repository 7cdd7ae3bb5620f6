"""Runs in: agent. The record of what happens in a job: a bounded log in memory, a file, the summary at the end."""
