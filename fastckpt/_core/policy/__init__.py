"""Runs in: pure. Decisions as functions of what is known: which slot, which checkpoint, what to keep, whom to blame."""
