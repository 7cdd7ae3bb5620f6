"""The arguments of a loader, and checks that they go together."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe, default_collate, default_convert

from fastckpt._core.arguments import choice, shown
from fastckpt.data.sampler import ResumableSampler
from fastckpt.errors import ConfigError

Seeding = Literal["sample", "batch", "none"]


@dataclass(frozen=True, kw_only=True)
class RequestedLoader:
    """The arguments of a `ResumableDataLoader` that decide its source of samples.

    Raises:
        ConfigError: They do not go together.
    """

    dataset: Any
    batch_size: int | None
    shuffle: bool
    seed: int
    drop_last: bool
    sampler: Iterable[Any] | None
    batch_sampler: Iterable[Any] | None
    num_workers: int
    collate_fn: Callable[[Any], Any] | None
    generator: None
    in_order: bool
    num_replicas: int | None
    rank: int | None
    uneven: bool
    sharded: bool
    repeatable: bool | None
    count: bool | None
    seeding: Seeding
    accumulate: int

    def __post_init__(self) -> None:
        choice("seeding", self.seeding, get_args(Seeding))
        self._check_numbers()
        for wrong, why in (
            (self.generator is not None, "generator: its state would not be saved; give seed"),
            (not self.in_order, "in_order=False: batches would come in no order that could be continued"),
            (self.accumulate < 1, f"accumulate is {self.accumulate}; give 1 or more batches per step"),
            (self.drop_last and self.uneven, "drop_last and uneven: the last batch is either dropped or not"),
            (self.drop_last and self.batch_size is None, "drop_last needs batches; batch_size is None"),
            (
                isinstance(self.dataset, IterDataPipe | MapDataPipe),
                "a DataPipe shuffles and shards itself: give it to torchdata's loader, or give a plain Dataset",
            ),
        ):
            if wrong:
                raise ConfigError(why)
        if self.iterable:
            self._check_iterable()
        else:
            self._check_indexed()

    @property
    def iterable(self) -> bool:
        """True if the data set has no indices."""
        return isinstance(self.dataset, IterableDataset)

    @property
    def collate(self) -> Callable[[Any], Any]:
        """The function that makes a batch of samples."""
        return self.collate_fn or (default_convert if self.batch_size is None else default_collate)

    def _check_numbers(self) -> None:
        for name in ("batch_size", "num_workers", "accumulate"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not hasattr(value, "__index__")):
                raise ConfigError(f"{name} is {shown(value)}; give a whole number")

    def _check_iterable(self) -> None:
        for name in ("sampler", "batch_sampler"):
            if getattr(self, name) is not None:
                raise ConfigError(f"an iterable data set has no indices: leave {name} out")
        if self.count is False and not hasattr(self.dataset, "state_dict"):
            raise ConfigError(
                f"count=False, but {type(self.dataset).__name__} has no state_dict to go on by: leave count out"
            )
        if _needs_arguments(getattr(self.dataset, "state_dict", None)):
            raise ConfigError(
                f"{type(self.dataset).__name__}.state_dict() has to be told how many samples were used, which its own "
                "loader counts: give data= that one, such as streaming.StreamingDataLoader(dataset, batch_size=...)"
            )
        if self.shuffle:
            raise ConfigError("an iterable data set cannot be shuffled by the loader: have it shuffle itself")

    def _check_indexed(self) -> None:
        sampler, batch_sampler = self.sampler, self.batch_sampler
        for name in ("sharded", "repeatable", "count"):
            if getattr(self, name):
                raise ConfigError(f"{name}=True is for iterable data sets; the loader shares out one with indices")
        if sampler is None and batch_sampler is None and not hasattr(self.dataset, "__len__"):
            raise ConfigError(f"{type(self.dataset).__name__} has no length; give it __len__, or a sampler")
        if sampler is not None and (self.shuffle or batch_sampler is not None):
            raise ConfigError("a sampler decides the order: leave shuffle and batch_sampler out")
        if batch_sampler is not None and (self.batch_size != 1 or self.shuffle or self.drop_last):
            raise ConfigError("a batch_sampler makes the batches: leave batch_size, shuffle and drop_last out")
        if isinstance(sampler, ResumableSampler):
            given = [name for name in ("num_replicas", "rank") if getattr(self, name) is not None]
            if given or self.seed not in (0, sampler.position.seed):
                raise ConfigError("the ResumableSampler says which rank this is, and the seed: give them to it alone")


def _needs_arguments(method: Any) -> bool:
    """Return whether a method cannot be called without arguments."""
    if method is None:
        return False
    try:
        inspect.signature(method).bind()
    except TypeError:
        return True
    except ValueError:  # it has no signature
        return False
    return False
