"""States of ranks, equal or unlike in one entry of one rank, saved and loaded by each checkpointer."""
