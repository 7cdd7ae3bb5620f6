"""Shared memory of this node: the arena, its slots, and the images in them."""
