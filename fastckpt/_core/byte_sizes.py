"""Bytes in words, in the largest unit of which there is at least one."""


def binary(count: int) -> str:
    """Format in powers of 1024, as limits of memory and of containers are given."""
    return _in_units(count, 1024, ("KiB", "MiB", "GiB", "TiB"))


def decimal(count: int) -> str:
    """Format in powers of 1000, as files and storage are measured."""
    return _in_units(count, 1000, ("kB", "MB", "GB", "TB"))


def _in_units(count: int, base: int, units: tuple[str, ...]) -> str:
    for power in range(len(units), 0, -1):
        if count >= base**power:
            return f"{count / base**power:.1f} {units[power - 1]}"
    return f"{count} B"
