"""Runs in: tools. Reading, checking, comparing and removing checkpoints outside of a job; without click or rich."""
