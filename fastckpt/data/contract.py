"""How a checkpointer saves and loads where data are, whatever object hands them out."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from fastckpt.data.position import VERSION, read
from fastckpt.data.split import rank_and_world
from fastckpt.errors import ConfigError

UNKNOWN = -1
"""The number of loader workers of an object that does not say."""


class DataState(NamedTuple):
    """Where data are.

    Attributes:
        common: Equal on all ranks; saved once.
        own: Of this rank; may be empty.
    """

    common: dict[str, Any]
    own: dict[str, Any]


def data_state(data: Any) -> DataState:
    """What to save, at the end of a step.

    Args:
        data: Has ``state_dict()`` and ``load_state_dict()``, and perhaps the same two of a rank.

    Raises:
        ConfigError: It has no such methods.
    """
    check_stateful(data)
    if hasattr(data, "rank_state_dict"):
        return DataState(data.state_dict(), data.rank_state_dict())
    rank, world = rank_and_world(None, None)
    common = {"version": VERSION, "foreign": 1, "world": world, "workers": getattr(data, "num_workers", UNKNOWN)}
    return DataState(common, {"version": VERSION, "rank": rank, "state": data.state_dict()})


def load_data_state(data: Any, common: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
    """Have data go on; call it before the first batch.

    Args:
        data: As given to `data_state`.
        common: What all ranks have in common.
        own: What this rank saved; None if it saved nothing, because there were fewer ranks.

    Raises:
        ConfigError: Data of this kind cannot go on with this many ranks or loader workers, or it is another kind.
    """
    check_stateful(data)
    known = hasattr(data, "rank_state_dict")
    if known is bool(common.get("foreign")):
        raise ConfigError(f"the position was saved by another kind of loader than {type(data).__name__}: give that one")
    if not known:
        _load_foreign(data, common, own)
        return
    data.load_state_dict(common)
    if own:
        data.load_rank_state_dict(own)


def _load_foreign(data: Any, common: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
    rank, world = rank_and_world(None, None)
    saved = read(common, ("world", "workers"))
    here = {"world": world, "workers": getattr(data, "num_workers", UNKNOWN)}
    if saved != here:
        raise ConfigError(
            f"{type(data).__name__} goes on with the numbers of ranks and loader workers that it was saved with only: "
            f"{saved['world']} and {saved['workers']}, now {here['world']} and {here['workers']}. "
            "Start that many, or use ResumableDataLoader"
        )
    if own is None or read(own, ("rank",))["rank"] != rank:
        raise ConfigError(f"rank {rank} has no position of {type(data).__name__} in this checkpoint")
    data.load_state_dict(own["state"])


def check_stateful(data: Any) -> None:
    """Raise ConfigError unless the position of data can be saved."""
    missing = [name for name in ("state_dict", "load_state_dict") if not hasattr(data, name)]
    if missing:
        raise ConfigError(
            f"data={type(data).__name__} has no {' and no '.join(missing)}: its position cannot be saved. Use "
            "ResumableDataLoader"
        )
