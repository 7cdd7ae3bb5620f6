"""Runs in: tools, agent, and child processes of both. Checks of a node, by itself and with others."""
