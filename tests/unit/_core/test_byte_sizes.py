"""Sizes are printed in the unit that fits them: a nonzero size is never printed as zero."""

from collections.abc import Callable

from fastckpt._core import byte_sizes
from fastckpt._core.byte_sizes import binary, decimal
from tests.support.tables import for_each


@for_each(
    (decimal, 999, "999 B"),
    (decimal, 1000, "1.0 kB"),
    (decimal, 10**14, "100.0 TB"),
    (binary, 2**30 - 2**20, "1023.0 MiB"),
    (binary, 3 << 29, "1.5 GiB"),
)
def test_sizes_are_printed_in_fitting_units(shown: Callable[[float], str], count: int, text: str):
    assert shown(count) == text


@for_each(("4GiB", 4 << 30), ("1.5 GB", 1_500_000_000), ("4096", 4096), ("12 B", 12), (" 3kB ", 3000), ("0.5KiB", 512))
def test_a_text_names_bytes(text, count):
    assert byte_sizes.parsed(text) == count
