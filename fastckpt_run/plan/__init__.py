"""Estimates of the memory, storage and time that the checkpoints of a job need."""
