"""A launch that is read and not made: what `fastckpt-run --fast-dry-run` prints."""
