"""Runs in: worker. State that ranks have in common, and one saves for all: compared, kept of each, or refused."""
