"""Bytes in words, in the largest unit of which there is at least one, and words as bytes."""

import re


def binary(count: int) -> str:
    """Format in powers of 1024, as limits of memory and of containers are given."""
    return _in_units(count, 1024, ("KiB", "MiB", "GiB", "TiB"))


def decimal(count: int) -> str:
    """Format in powers of 1000, as files and storage are measured."""
    return _in_units(count, 1000, ("kB", "MB", "GB", "TB"))


def parsed(text: str) -> int:
    """The bytes that a text such as "4GiB", "1.5 GB" or "4096" names; raises ValueError for others."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([kKMGT])(i?)B|B)?", text.strip())
    if found is None:
        raise ValueError(text)
    number, unit, is_binary = found.groups()
    power = "KMGT".index(unit.upper()) + 1 if unit else 0
    return int(float(number) * (1024 if is_binary else 1000) ** power)


def _in_units(count: int, base: int, units: tuple[str, ...]) -> str:
    for power in range(len(units), 0, -1):
        if count >= base**power:
            return f"{count / base**power:.1f} {units[power - 1]}"
    return f"{count} B"
