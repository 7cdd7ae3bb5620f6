"""Runs in: pure. Intervals of saves to memory and to storage, from the costs of saves and failures."""
