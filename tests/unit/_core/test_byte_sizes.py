"""Sizes are printed in the unit that fits them: a nonzero size is never printed as zero."""

import pytest

from fastckpt._core import byte_sizes
from fastckpt._core.byte_sizes import binary, decimal


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_500_000, "1.5 MB"), (2 * 10**9, "2.0 GB"), (10**14, "100.0 TB")],
)
def test_decimal_sizes_are_printed_in_fitting_units(count: int, text: str):
    assert decimal(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(1023, "1023 B"), (1024, "1.0 KiB"), (64 << 20, "64.0 MiB"), (2**30 - 2**20, "1023.0 MiB"), (3 << 29, "1.5 GiB")],
)
def test_binary_sizes_are_printed_in_fitting_units(count: int, text: str):
    assert binary(count) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [("4GiB", 4 << 30), ("1.5 GB", 1_500_000_000), ("4096", 4096), ("12 B", 12), (" 3kB ", 3000), ("0.5KiB", 512)],
)
def test_a_text_names_bytes(text, count):
    assert byte_sizes.parsed(text) == count


@pytest.mark.parametrize("text", ["", "4 pounds", "GiB", "-1", "1e9", "4Gi", "1.GiB", "auto"])
def test_another_text_names_none(text):
    with pytest.raises(ValueError):
        byte_sizes.parsed(text)
