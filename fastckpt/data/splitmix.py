"""Pseudo-random numbers as pure functions: SplitMix64, in Python's and in torch's integers alike.

Source: Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014, with the constants of
Stafford's variant 13 of the finalizer, as in Java's and Vigna's SplitMix64.
Integer arithmetic modulo 2**64 alone: equal on every platform and with every version of Python and torch.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

GAMMA = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB
MASK = 2**64 - 1
_GAMMA, _LAST = np.uint64(GAMMA), np.uint64(31)
_ROUNDS = ((np.uint64(30), np.uint64(FIRST)), (np.uint64(27), np.uint64(SECOND)))


def mix(*numbers: int) -> int:
    """A number below 2**64 that depends on all of these, and on their order; they count modulo 2**64."""
    mixed = 0
    for number in numbers:
        # GAMMA keeps mix(0) from being 0, which the finalizer maps to itself.
        mixed = _finalize((mixed + number + GAMMA) & MASK)
    return mixed


def mix_each(first: tuple[int, ...], *columns: Sequence[int]) -> list[int]:
    """``mix(*first, *row)`` for each row of columns that are equally long, or have one number for all rows."""
    mixed = np.array([mix(*first)], dtype=np.uint64)
    for column in columns:
        mixed = mixed + (_array(column) + _GAMMA)
        for bits, factor in _ROUNDS:
            # numpy's uint64 wraps around silently, as the algorithm needs.
            mixed ^= mixed >> bits
            mixed *= factor
        mixed ^= mixed >> _LAST
    numbers: list[int] = mixed.tolist()
    return numbers


def _array(numbers: Sequence[int]) -> NDArray[np.uint64]:
    if isinstance(numbers, range):  # else numpy asks it for each
        return np.arange(numbers.start, numbers.stop, numbers.step, dtype=np.uint64)
    return np.array(numbers, dtype=np.uint64)


def permutation(key: int, length: int) -> torch.Tensor:
    """The permutation of ``range(length)`` that belongs to a key: int64, of shape (length,).

    It ranks the first ``length`` outputs of SplitMix64. For one key no two are equal, because the generator maps its
    counter one to one; so there are no ties, and how one sorts does not matter. Takes 24 bytes per number meanwhile.
    """
    counters = torch.arange(1, length + 1, dtype=torch.int64).mul_(_signed(GAMMA)).add_(_signed(key))
    keys = _shifted(counters, 30).mul_(_signed(FIRST))
    keys = _shifted(keys, 27).mul_(_signed(SECOND))
    return torch.argsort(_shifted(keys, 31))


def _finalize(number: int) -> int:
    number = ((number ^ (number >> 30)) * FIRST) & MASK
    number = ((number ^ (number >> 27)) * SECOND) & MASK
    return number ^ (number >> 31)


def _shifted(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """``numbers ^ (numbers >> bits)`` of unsigned numbers: torch's shift of signed ones draws the sign in."""
    return numbers.bitwise_right_shift(bits).bitwise_and_(2 ** (64 - bits) - 1).bitwise_xor_(numbers)


def _signed(number: int) -> int:
    number &= MASK
    return number - 2**64 if number >= 2**63 else number
