"""Runs in: pure. How often to save to memory and to storage, from what saves and failures cost."""
