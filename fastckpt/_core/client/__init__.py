"""Runs in: worker. The connection to the saver, and agreements of ranks among themselves."""
