"""Python values of a checkpoint, loaded so that none of them runs code, whichever planner they are for."""

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from fastckpt._core.format.manifest import METADATA
from fastckpt._core.io.regular_file import open_regular
from fastckpt._core.resume.load import refusal
from fastckpt._core.torch_private.sharding import set_element
from fastckpt.dcp.stored_metadata import read_metadata


class PlannerOfValues:
    """A planner as a reader calls it, to which values come as ``torch.load(weights_only=True)`` loads them.

    torch's planners load them with ``weights_only=False``.

    Args:
        planner: The planner.
        name: The name of an item in errors.
    """

    def __init__(self, planner: LoadPlanner, name: Callable[[ReadItem], str]) -> None:
        self._planner, self._name = planner, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, item: ReadItem, archive: io.BytesIO) -> None:
        """Load a value; raises UnpicklingError for one that names a class which is not allowed."""
        value = _loaded(archive, self._name(item))
        planner: Any = self._planner
        name = item.dest_index.fqn
        if getattr(planner.load_bytes, "__func__", None) is not DefaultLoadPlanner.load_bytes:
            # It gets an archive that was made here: how it reads the bytes of a file is unknown.
            planner.load_bytes(item, _archive(value))
        elif planner.flatten_state_dict:  # as torch's does
            set_element(planner.original_state_dict, planner.mappings[name], value)
        else:
            planner.state_dict[name] = value


def check_shards(folder: Path) -> None:
    """Check that files run no code when a framework loads them by torch's own reader, which unpickles anything.

    Raises UnpicklingError for ``.metadata`` or a value, in the folder or one in it, that names a forbidden class.
    Raises BadCheckpoint for ``.metadata`` that is not as torch writes it.
    """
    for path in (folder / METADATA, *sorted(folder.glob(f"*/{METADATA}"))):
        if not path.exists():
            continue
        metadata = read_metadata(path, weights_only=True)
        for index, place in metadata.storage_data.items():
            if isinstance(metadata.state_dict_metadata.get(index.fqn), BytesStorageMetadata):
                shard = path.parent / place.relative_path
                with os.fdopen(open_regular(shard, follow=True), "rb") as file:
                    file.seek(place.offset)
                    _loaded(io.BytesIO(file.read(place.length)), f"{index.fqn!r} in {shard}")


def _loaded(archive: io.BytesIO, name: str) -> Any:
    try:
        return torch.load(archive, weights_only=True)
    except pickle.UnpicklingError as error:
        raise refusal(name, error) from error


def _archive(value: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file
