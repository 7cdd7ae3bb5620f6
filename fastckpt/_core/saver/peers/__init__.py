"""Runs in: agent. Files that agents of several nodes give each other, from memory to memory."""
