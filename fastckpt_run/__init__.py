"""A torchrun-compatible launcher whose agent keeps checkpoints in shared memory."""
