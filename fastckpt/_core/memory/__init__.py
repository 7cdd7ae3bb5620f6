"""Runs in: both. Shared memory of a node: the arena, its slots, who may write to them, telemetry."""
