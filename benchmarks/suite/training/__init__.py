"""Costs of what else surrounds training: data, activations on disk, the watching of a job."""
