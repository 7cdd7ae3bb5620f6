"""Runs in: pure. Intervals of saves to memory and to storage, from what saves and failures cost."""
