"""The generators that random transforms draw from: torch's on the CPU, Python's, and numpy's if it is imported."""

import random
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch

from fastckpt._core.data.generator_draws import DrawWatch

KINDS = ("torch", "python", "numpy")


def seed_generators(seed: int, kinds: Collection[str] = KINDS) -> None:
    """Seed the generators; ``torch.initial_seed()`` then gives ``seed``, for generators that a data set makes itself.

    Args:
        seed: Below 2**64.
        kinds: The generators to seed.
    """
    if "torch" in kinds:
        torch.default_generator.manual_seed(seed)
    if "python" in kinds:
        random.seed(seed)
    if "numpy" in kinds and (numpy := sys.modules.get("numpy")):
        numpy.random.seed(seed // 2**32)  # torch's takes the lower half, into the same kind of generator


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the generators at the end of the with block to their states at its beginning."""
    watch = DrawWatch((), restores=True)
    try:
        yield
    finally:
        watch.restore(watch.moved())
