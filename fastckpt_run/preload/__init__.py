"""Runs in: both. Workers forked from a process that has imported torch, instead of each importing it again."""
