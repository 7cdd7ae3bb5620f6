"""Kills in a running job of one's own: its processes, which are surely these, and what came back after each kill."""
