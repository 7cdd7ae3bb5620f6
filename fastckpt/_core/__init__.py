"""The inside of fastckpt: nothing here is for users.

The first line of each package names the process in which its code runs: the agent of a node, its workers, both, or any
process because the code is pure.
"""
