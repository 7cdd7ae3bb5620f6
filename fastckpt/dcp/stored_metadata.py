"""Reads ``.metadata``, and the index of a node's copies, of a checkpoint, and checks their contents."""

import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from fastckpt._core.io.regular_file import open_regular
from fastckpt._core.torch_private.sharding import PICKLED_PROPERTIES, StorageInfo
from fastckpt.dcp.known_classes import unpickled
from fastckpt.errors import BadCheckpoint

_REMEDY = (
    ", which is no part of what torch.distributed.checkpoint says of a checkpoint: pass weights_only=False to the "
    "checkpointer if you trust whoever wrote it"
)
_SIZE, _NONE = torch.Size, type(None)
_FIELDS: dict[type, dict[str, tuple[type, ...]]] = {
    Metadata: {"state_dict_metadata": (dict,), "storage_data": (dict,), "storage_meta": (StorageMeta, _NONE)},
    TensorStorageMetadata: {"properties": PICKLED_PROPERTIES, "size": (_SIZE,), "chunks": (list,)},
    BytesStorageMetadata: {},
    ChunkStorageMetadata: {"offsets": (_SIZE,), "sizes": (_SIZE,)},
    MetadataIndex: {"fqn": (str,), "offset": (_SIZE, _NONE)},
    StorageInfo: {"relative_path": (str,), "offset": (int,), "length": (int,)},
    **{kind: {"dtype": (torch.dtype,)} for kind in PICKLED_PROPERTIES},
}
"""The types of the attributes that are read of each part."""
_ENTRIES = TensorStorageMetadata, BytesStorageMetadata
LONGEST_LIST = 1 << 20
"""Items of a list in a state, at most: torch makes all that come before the one that has an entry."""


def read_metadata(path: Path, *, weights_only: bool) -> Metadata:
    """The metadata of a checkpoint.

    Args:
        path: The file.
        weights_only: Whether it may name only the classes that torch.distributed.checkpoint writes; else it may run
            any code, and is taken as it is.

    Raises:
        UnpicklingError: It names something else, or is damaged.
        BadCheckpoint: It is of another shape.
    """
    found = _read(path, weights_only=weights_only)
    if weights_only:
        _check(path, _misfits(found))
    return found  # type: ignore[no-any-return]


def read_index(path: Path, *, weights_only: bool) -> dict[MetadataIndex, Any]:
    """The places of a node's copies; otherwise as `read_metadata`."""
    found = _read(path, weights_only=weights_only)
    if weights_only:
        _check(path, _misplaced(found))
    return found  # type: ignore[no-any-return]


def check_paths(metadata: Metadata, path: Path) -> None:
    """Raise BadCheckpoint if paths of entries are not as a state made flat has them: names, and places in lists."""
    if metadata.planner_data:
        _check(path, _misled(metadata.planner_data, metadata.state_dict_metadata))


def _read(path: Path, *, weights_only: bool) -> Any:
    with os.fdopen(open_regular(path, follow=True), "rb") as file:
        return unpickled(file, str(path), _REMEDY) if weights_only else pickle.load(file)


def _check(path: Path, faults: Iterator[str]) -> None:
    for fault in faults:
        raise BadCheckpoint(f"{path} is not as torch.distributed.checkpoint writes it: {fault}")


# Faults show names alone: the text of other values can be longer than memory.
def _misfits(metadata: Any) -> Iterator[str]:
    if not _is(metadata, Metadata):
        yield f"it has a {type(metadata).__name__}, or other fields"
        return
    for name, entry in metadata.state_dict_metadata.items():
        if type(name) is not str or type(entry) not in _ENTRIES or not _is(entry, type(entry)):
            yield f"the entry {_named(name)} is a {type(entry).__name__}, or has other fields"
        elif type(entry) is TensorStorageMetadata:
            parts = all(_is(chunk, ChunkStorageMetadata) for chunk in entry.chunks)
            if not parts or not _is(entry.properties, type(entry.properties)):
                yield f"the tensor {_named(name)} has chunks or properties with other fields"
    yield from _misplaced(metadata.storage_data)


def _misplaced(places: Any) -> Iterator[str]:
    """Yield a description of each entry that has no valid place, or one elsewhere than beside the file."""
    if not isinstance(places, dict):
        yield f"a {type(places).__name__} is to say where its parts are"
        return
    for index, place in places.items():
        if not _is(index, MetadataIndex) or not _is(place, StorageInfo) or min(place.offset, place.length) < 0:
            yield f"it does not say where {_named(getattr(index, 'fqn', index))} is"
        elif PurePath(place.relative_path).is_absolute() or ".." in PurePath(place.relative_path).parts:
            yield f"{_named(index.fqn)} would be outside of its directory, in {_named(place.relative_path)}"


def _misled(paths: Any, names: Mapping[str, Any]) -> Iterator[str]:
    if not isinstance(paths, dict):
        yield f"a {type(paths).__name__} is to say where in the state its entries are"
        return
    for name in names:
        path = paths.get(name)
        if type(path) is not tuple or not _is_path(path):
            yield f"it does not say where in the state {_named(name)} is"


def _named(name: object) -> str:
    return repr(name[:200]) if isinstance(name, str) else f"of type {type(name).__name__}"


def _is_path(path: tuple[object, ...]) -> bool:
    steps = (type(step) is str or (type(step) is int and 0 <= step < LONGEST_LIST) for step in path)
    return bool(path) and type(path[0]) is str and all(steps)


def _is(part: Any, kind: type) -> bool:
    """Return whether it is of this kind, and its attributes that are read are of theirs."""
    if type(part) is not kind:
        return False
    held = vars(part)
    return all(type(held.get(name)) in kinds for name, kinds in _FIELDS[kind].items())
