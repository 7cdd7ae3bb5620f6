"""Costs of saves: what training waits, what a persist and the memory cost, beside limits and peers."""
