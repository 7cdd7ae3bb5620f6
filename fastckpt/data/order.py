"""The order of an epoch's samples: a pure function of (seed, epoch, length), or drawn from a user's sampler."""

import itertools
import random
import zlib
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any, Protocol

import numpy as np
import torch

from fastckpt._core.data.generators import generators_kept, seed_generators
from fastckpt.data.splitmix import mix, permutation
from fastckpt.errors import ConfigError

ORDER, SAMPLE, COLLATE, WORKERS, STREAM = range(5)
"""Purposes of random numbers: they start the key of each draw, so that none can be derived from another."""

END = object()

_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_TRIED = 4096
"""Keys that are drawn twice, to check that they are the same."""


class Order(Protocol):
    """Gives the keys by which a data set knows its samples, in the order of an epoch."""

    def length(self, seed: int, epoch: int) -> int:
        """The number of keys."""

    def take(self, seed: int, epoch: int, positions: Iterable[int]) -> list[Any]:
        """Return the samples at some positions, counted in circles."""

    def identity(self, seed: int, epoch: int) -> int:
        """A number that distinguishes this order from others of the same seed, epoch and length."""


class IndexOrder:
    """The indices of a data set, shuffled or as they are. 8 bytes per sample, 24 for a moment while it shuffles."""

    def __init__(self, dataset: Sized, *, shuffle: bool) -> None:
        self._dataset = dataset
        self._shuffle = shuffle
        self._newest: tuple[Any, Any] = None, None

    def length(self, _seed: int, _epoch: int) -> int:
        """The number of keys."""
        return len(self._dataset)

    def take(self, seed: int, epoch: int, positions: Iterable[int]) -> list[int]:
        """Return the samples at some positions, counted in circles."""
        length = len(self._dataset)
        if isinstance(positions, range) and positions.stop <= length:
            # A slice of the tensor is a view, without a list of Python integers.
            places: Any = slice(positions.start, positions.stop, positions.step)
        else:
            places = [position % length for position in positions]
        if not self._shuffle:
            return list(positions) if isinstance(places, slice) else places
        key = (seed, epoch, length)
        # One order is kept: an epoch of 100 million samples takes 800 MB, and only one is in use.
        if self._newest[0] != key:
            self._newest = key, permutation(mix(ORDER, seed, epoch), length)
        indices: list[int] = self._newest[1][places].tolist()
        return indices

    def identity(self, _seed: int, _epoch: int) -> int:
        """Return 1 if shuffled, else 0."""
        return int(self._shuffle)


class DrawnOrder:
    """Order of a user's sampler or batch sampler, drawn when an epoch begins with generators seeded for it.

    Args:
        sampler: Must be finite and the same on all ranks; its random numbers must come from the default generators.

    Raises:
        ConfigError: It has no length; it, or a sampler that it wraps, keeps a generator of its own, or shards by
            itself. Later: it gives more than its length, or something else when it is drawn again.
    """

    def __init__(self, sampler: Iterable[Any]) -> None:
        if not isinstance(sampler, Sized):
            raise ConfigError(
                f"{type(sampler).__name__} has no length; give a sampler with __len__, so that an epoch has an end"
            )
        for each in _wrapped(sampler):
            name = type(each).__name__
            for attribute, value in getattr(each, "__dict__", {}).items():
                if isinstance(value, _GENERATORS):
                    raise ConfigError(
                        f"{name} keeps a generator of its own, {attribute}, whose state is not saved: leave it out, "
                        "and draw from torch's, Python's or numpy's default generator, which are seeded for each epoch"
                    )
            if hasattr(each, "num_replicas"):
                raise ConfigError(
                    f"{name} shards among ranks by itself, by its num_replicas, and the loader would shard again: "
                    "leave the sampler out, or give one that is the same on all ranks, or a ResumableSampler"
                )
        self._sampler = sampler
        self._size = sampler
        self._tried = False
        self._newest: tuple[Any, Any] = None, None

    def length(self, seed: int, epoch: int) -> int:
        """The number of keys."""
        return len(self._keys(seed, epoch)[0])

    def take(self, seed: int, epoch: int, positions: Iterable[int]) -> list[Any]:
        """Return the samples at some positions, counted in circles."""
        keys, _ = self._keys(seed, epoch)
        return [keys[position % len(keys)] for position in positions]

    def identity(self, seed: int, epoch: int) -> int:
        """A checksum of the sampler's keys."""
        return self._keys(seed, epoch)[1]

    def _keys(self, seed: int, epoch: int) -> tuple[Sequence[Any], int]:
        if self._newest[0] != (seed, epoch):
            self._newest = (seed, epoch), self._draw(seed, epoch)
        keys, identity = self._newest[1]
        return keys, identity

    def _try(self, seed: int, epoch: int) -> list[Any] | None:
        """The first keys, before the first epoch is drawn; None later."""
        if self._tried:
            return None
        self._tried = True
        return list(itertools.islice(self._begin(seed, epoch), min(len(self._size), _TRIED)))

    def _begin(self, seed: int, epoch: int) -> Iterator[Any]:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        # Seeded for the epoch, so that the same keys are drawn again after a resume, and on every rank.
        seed_generators(mix(ORDER, seed, epoch))
        return _plain(self._sampler)

    def _draw(self, seed: int, epoch: int) -> tuple[Sequence[Any], int]:
        with generators_kept():
            tried = self._try(seed, epoch)
            given, length = self._begin(seed, epoch), len(self._size)
            # At most its length: a sampler without an end would fill the memory.
            keys = list(itertools.islice(given, length))
            if tried is not None and repr(tried) != repr(keys[:_TRIED]):
                raise ConfigError(
                    f"{type(self._sampler).__name__} gives other keys each time that it is drawn, though the default "
                    "generators are seeded alike: a resume could not go on in its order. Have it keep no state, and "
                    "give keys that print alike, such as numbers"
                )
            if next(given, END) is not END:
                raise ConfigError(
                    f"{type(self._sampler).__name__} gives more than the {length} that its __len__ says: the rest of "
                    "an epoch would be lost. Have __len__ tell how many it gives"
                )
        # Above 1: 0 and 1 are the identities of `IndexOrder`.
        return keys, 2 + zlib.crc32(repr(keys).encode())


def _wrapped(sampler: Any) -> Iterator[Any]:
    """A sampler, the one that it wraps, as BatchSampler does, and so on."""
    seen: list[Any] = []
    while sampler is not None and not any(sampler is each for each in seen):
        yield sampler
        seen.append(sampler)
        sampler = getattr(sampler, "sampler", None)


def _plain(keys: Iterable[Any]) -> Iterator[Any]:
    """Keys with the same text in every process: samplers may give tensors."""
    return (key.tolist() if isinstance(key, torch.Tensor) else key for key in keys)
