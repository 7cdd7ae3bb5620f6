"""Runs in: both. Messages between workers and the saver: JSON with a schema over an abstract Unix socket."""
