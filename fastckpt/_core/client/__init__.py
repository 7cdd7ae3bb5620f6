"""Runs in: worker. The connection to the saver, and what ranks agree on among themselves."""
