"""The part of a checkpoint that is compared with the saved digests."""

from fastckpt._core.arguments import choice

MODES = ("never", "resume", "always")
"""Modes in order of cost: sizes alone; digests before a resume; and persisted files are read back as well."""


def verify_mode(value: object) -> str:
    """Check the option ``verify``; raises ConfigError for any other value."""
    return choice("verify", value, MODES)
