"""Runs in: worker. What ranks have in common, and one saves for all: compared, kept of each rank, or refused."""
