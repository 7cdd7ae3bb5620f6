"""Runs in: both. Shared memory of a node: the arena, its slots, their writers, telemetry."""
