"""The generators that random transforms draw from: torch's on the CPU, Python's, and numpy's if it is imported."""

import random
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch

from fastckpt._core.data.generator_draws import DrawWatch

KINDS = ("torch", "python", "numpy")


def seed_generators(seed: int, kinds: Collection[str] = KINDS) -> None:
    """Set them; ``torch.initial_seed()`` then gives ``seed``, for generators that a data set makes itself.

    Args:
        seed: Below 2**64.
        kinds: Which of them.
    """
    if "torch" in kinds:
        torch.default_generator.manual_seed(seed)
    if "python" in kinds:
        random.seed(seed)
    if "numpy" in kinds and (numpy := sys.modules.get("numpy")):
        numpy.random.seed(seed // 2**32)  # torch's takes the lower half, into the same kind of generator


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leave them at the end as they were at the beginning."""
    watch = DrawWatch((), restores=True)
    try:
        yield
    finally:
        watch.restore(watch.moved())
