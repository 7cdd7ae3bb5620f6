"""Knowledge of others' streams: how to set their epoch, gaps in their states, how they are seeded."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from torch import Generator

from fastckpt._core.data.generators import generators_kept

REMEDIES = {
    "webdataset": "Pass WebDataset(..., seed=0, detshuffle=True), and .compose(webdataset.detshuffle(1000, seed=0)) or "
    ".shuffle(1000, seed=0); without sharded=True also nodesplitter=None and workersplitter=None",
    "datasets": "Pass .shuffle(seed=0); with split_dataset_by_node pass sharded=True to the loader",
}


def share_epoch(dataset: Any, epoch: int, workers: int) -> None:
    """Set the epoch of a data set in the process that owns its loader workers, before they do.

    Data sets of Hugging Face have it in memory that all processes share, and ``set_epoch`` adds the difference from
    the old one: workers that do so at the same time would add it several times. Now the difference is 0.
    """
    if workers > 1 and hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)


def begin_epoch(dataset: Any, epoch: int) -> None:
    """Set the epoch of a data set before it is opened.

    Stages of webdataset count their openings instead, and seed themselves by that count. The count is set, so that a
    process that opens the stream for the first time in a later epoch reads that epoch.
    """
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
    for stage in _stages(dataset):
        if isinstance(getattr(stage, "epoch", None), int):
            # One less: the stage counts up before it uses the number.
            stage.epoch = epoch - 1


def visit_next_epoch(dataset: Any, epoch: int) -> None:
    """Set the epoch after this one, and this one again: a trial then sees an order that is made of earlier epochs.

    Of several loader workers none is to: they may have the epoch in memory that they share. There may be no next one.
    """
    if hasattr(dataset, "set_epoch"):
        with suppress(Exception):
            dataset.set_epoch(epoch + 1)
        dataset.set_epoch(epoch)


def has_begun(loader: Any) -> bool | None:
    """Return whether torchdata's StatefulDataLoader has an iterator; None for another loader."""
    return loader._iterator is not None if hasattr(loader, "next_iter_state") else None


def begin_quietly(loader: Any, state: Any) -> None:
    """Have the next iterator of torchdata's StatefulDataLoader, which was loaded, draw nothing as it begins.

    It draws a seed for its workers, which an uninterrupted run has not drawn in the middle of an epoch.

    Args:
        loader: Any loader; others are left alone.
        state: That of the loader's own generator, which decides the orders of later epochs; None if it was not saved.
    """
    if has_begun(loader) is None:
        return
    begin = loader._get_iterator

    def begin_once() -> Any:
        vars(loader).pop("_get_iterator", None)
        with generators_kept():
            iterator = begin()
        if state is not None and isinstance(loader.generator, Generator):
            loader.generator.set_state(state)
        return iterator

    # Not at once: a script may first set the epoch of its sampler.
    vars(loader)["_get_iterator"] = begin_once


def leaves_out(dataset: Any) -> str | None:
    """The part that the state of a data set is known to leave out; None if nothing is known."""
    kinds = {type(each).__name__ for each in _inner(getattr(dataset, "_ex_iterable", None))}
    return "shuffle buffer" if "BufferShuffledExamplesIterable" in kinds else None


def lacks_seed(dataset: Any) -> bool:
    """Return whether a stream shuffles by an unseeded generator of numpy: each start has another order then.

    numpy draws 128 bits for such a one, and nobody writes a seed of more than 64.
    """
    generators = (getattr(each, "generator", None) for each in _inner(getattr(dataset, "_ex_iterable", None)))
    seeds = (getattr(getattr(each, "bit_generator", None), "seed_seq", None) for each in generators)
    entropies = (getattr(seed, "entropy", None) for seed in seeds)
    return any(isinstance(entropy, int) and entropy >= 2**64 for entropy in entropies)


def remedy(dataset: Any) -> str:
    """Advice to make a data set give the same samples at each start, and on each rank."""
    return REMEDIES.get(_home(dataset)) or (
        "Have __iter__ begin again, and make its generators there, from a seed and the epoch (set_epoch); what each "
        "rank chooses for itself needs sharded=True"
    )


def _home(thing: Any) -> str:
    """The package of a class, or of the nearest one that it is derived from and that is known."""
    homes = [each.__module__.split(".")[0] for each in type(thing).__mro__]
    return next((home for home in homes if home in REMEDIES), homes[0])


def _stages(dataset: Any) -> Iterator[Any]:
    """Stages of webdataset's pipelines, also within each other."""
    for stage in getattr(dataset, "pipeline", ()) if _home(dataset) == "webdataset" else ():
        yield stage
        yield from _stages(stage)


def _inner(node: Any) -> Iterator[Any]:
    """The steps of which a Hugging Face stream consists."""
    if node is not None:
        yield node
        for each in (getattr(node, "ex_iterable", None), *(getattr(node, "ex_iterables", None) or ())):
            yield from _inner(each)
