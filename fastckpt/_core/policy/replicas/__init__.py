"""Runs in: pure. Copies of a node's state on other nodes: the holders of each, and the copies left after a loss."""
