"""Runs in: agent. Persists and uploads in the background, and the right to publish."""
