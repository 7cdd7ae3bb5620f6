"""The inside of fastckpt: nothing here is for users.

Each package says on its first line in which process its code runs: the agent of a node, its workers, both, or in any
process because it is pure.
"""
