"""Runs in: pure. Copies of a node's state on other nodes: who holds whose, and what a loss leaves."""
