"""Runs in: pure. Decisions as functions of known facts: which slot, which checkpoint, what to keep, whom to blame."""
