"""Kills in a running job of one's own: its processes, which are surely these, and the recovery after each kill."""
