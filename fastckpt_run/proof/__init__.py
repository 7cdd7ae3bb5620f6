"""Runs of a script with and without kills, compared bit for bit."""
