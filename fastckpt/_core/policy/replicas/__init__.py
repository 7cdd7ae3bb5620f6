"""Runs in: pure. Copies of a node's state on other nodes: who holds whose, and the copies left after a loss."""
