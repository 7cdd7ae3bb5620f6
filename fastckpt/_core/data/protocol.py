"""Saves and loads the state of an object that hands out data, of any class."""

import logging
from collections.abc import Mapping
from operator import length_hint
from typing import Any, NamedTuple

from torch import Generator

from fastckpt._core.data.known_libraries import begin_quietly, has_begun, leaves_out
from fastckpt._core.data.position import VERSION, read
from fastckpt._core.data.split import rank_and_world
from fastckpt._core.error_codes import coded
from fastckpt.errors import ConfigError

logger = logging.getLogger("fastckpt")

GENERATOR = "generator"
"""Key of the state of a foreign loader's own generator, which its state leaves out; earlier versions had none."""
UNKNOWN = -1
"""The default of a property that an object lacks."""

WORDS = {"world": "ranks", "workers": "loader workers", "length": "samples", "batch": "samples per batch"}


class DataState(NamedTuple):
    """The position of an object that gives data.

    Attributes:
        common: Equal on all ranks; saved once.
        own: State of this rank; may be empty.
    """

    common: dict[str, Any]
    own: dict[str, Any]


def data_state(data: Any) -> DataState:
    """State of data to save at the end of a step.

    Args:
        data: As for ``data=`` of a checkpointer.

    Raises:
        ConfigError: It has no such methods.
    """
    check_stateful(data)
    if hasattr(data, "rank_state_dict"):
        return DataState(data.state_dict(), data.rank_state_dict())
    rank, _ = rank_and_world(None, None)
    own = {"version": VERSION, "rank": rank, "state": data.state_dict()}
    generator = getattr(data, "generator", None)
    return DataState(
        _circumstances(data) | {"version": VERSION, "foreign": 1},
        own | ({GENERATOR: generator.get_state()} if isinstance(generator, Generator) else {}),
    )


def load_data_state(data: Any, common: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
    """Restore the position of data, before the first batch.

    Args:
        data: As for ``data_state``.
        common: State of all ranks.
        own: State of this rank; None if there were fewer ranks.

    Raises:
        ConfigError: The data does not fit, or cannot continue with this number of ranks or loader workers.
    """
    check_stateful(data)
    known = hasattr(data, "rank_state_dict")
    if known is bool(common.get("foreign")):
        raise ConfigError(f"the position was saved by another kind of loader than {type(data).__name__}: give that one")
    if not known:
        _load_foreign(data, common, own)
        return
    # Common first: a rank's own state is checked against the number of ranks and shards in it.
    data.load_state_dict(common)
    if own:
        data.load_rank_state_dict(own)


def _load_foreign(data: Any, common: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
    rank, _ = rank_and_world(None, None)
    here = _circumstances(data)
    saved = here | read(common, tuple(name for name in here if name in common))
    # Such a state counts in its own units (batches of a rank, or of a worker): with other numbers it leads elsewhere.
    if changed := [name for name in here if saved[name] != here[name]]:
        raise ConfigError(
            coded(
                f"{type(data).__name__} would go on with other data: it was saved with "
                f"{' and '.join(f'{saved[name]} {WORDS[name]}, now {here[name]}' for name in changed)}. "
                "Give what it was saved with, or use ResumableDataLoader",
                "FC-040",
            )
        )
    if own is None or read(own, ("rank",))["rank"] != rank:
        raise ConfigError(f"rank {rank} has no position of {type(data).__name__} in this checkpoint")
    if hasattr(getattr(data, "sampler", None), "next_yielded") and not here["workers"]:
        logger.warning(
            "%s without loader workers gives nothing in the next epoch if it was saved after the end of one: give "
            "torch's DistributedSampler (docs/guides/data.md)",
            type(data.sampler).__name__,
        )
    if has_begun(data):
        logger.warning(
            "%s was iterated before resume(): an iterator made before goes on from its own place, not from the saved "
            "one. Call iter() after resume()",
            type(data).__name__,
        )
    data.load_state_dict(own["state"])
    begin_quietly(data, own.get(GENERATOR))


def _circumstances(data: Any) -> dict[str, int]:
    """The numbers of ranks and workers under which alone the state of a foreign object means the same."""
    _, world = rank_and_world(None, None)
    workers, batch = (getattr(data, name, None) for name in ("num_workers", "batch_size"))
    return {
        "world": world,
        "workers": UNKNOWN if workers is None else workers,
        "length": length_hint(getattr(data, "dataset", ()), 0),
        "batch": UNKNOWN if batch is None else batch,
    }


def check_stateful(data: Any) -> None:
    """Raise ConfigError unless the position of data can be saved, and leads back to it."""
    missing = [name for name in ("state_dict", "load_state_dict") if not hasattr(data, name)]
    if missing:
        raise ConfigError(
            coded(
                f"data={type(data).__name__} has no {' and no '.join(missing)}: its position cannot be saved. Use "
                "ResumableDataLoader",
                "FC-039",
            )
        )
    if not hasattr(data, "rank_state_dict"):
        _check_lossless(data)


def _check_lossless(data: Any) -> None:
    """Raise ConfigError if the state of a foreign object is known to lose samples."""
    for stream in (data, getattr(data, "dataset", None)):
        if left_out := leaves_out(stream):
            name = type(data).__name__
            raise ConfigError(
                coded(
                    f"the state of {name} leaves out the {left_out} of its data set: at each resume the samples in it "
                    "would be lost. Give data=ResumableDataLoader(dataset, ...), which counts samples, or shuffle "
                    "elsewhere",
                    "FC-039",
                )
            )
