"""Decisions as pure functions: when, which, where from."""
