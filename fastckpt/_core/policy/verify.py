"""The part of a checkpoint that is compared with what was saved."""

from fastckpt._core.arguments import choice

LEVELS = ("never", "resume", "always")
"""From the least to the most: sizes alone, digests before a resume, and what was persisted is read back as well."""


def level(value: object) -> str:
    """Check the option ``verify``; raises ConfigError for any other value."""
    return choice("verify", value, LEVELS)
