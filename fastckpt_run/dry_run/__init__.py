"""A launch that is read and not made: the output of `fastckpt-run --fast-dry-run`."""
