"""A checkpoint of torch.distributed.checkpoint (DCP) as one state, found without running any code that it names.

``.metadata`` names the values and tensors, and where in the ``.distcp`` files their bytes or chunks are stored; each of
these is an archive of torch.save.
"""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any, BinaryIO

from fastckpt._core.inspect.archive import LARGEST_PICKLE, Archive, Extent, OpenFile
from fastckpt._core.inspect.pickled import Object, Storage, Tensor, describe, name_of
from fastckpt.errors import BadCheckpoint

_MISSHAPEN = (LookupError, TypeError, ValueError, AttributeError)
"""Exceptions that a `.metadata` of another shape than torch's can raise."""


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor, or a whole value (without offsets), and the place of its archive."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    extent: Extent


class Distributed:
    """The state that an open ``.metadata`` describes.

    Args:
        file: Open for reading and seekable; it stays the caller's to close.
        name: Its path, for errors.
        part: Opens the file of that name beside it.

    Attributes:
        tensors: By key, described; None for a value that is no tensor.
        paths: By key, the path to it through the containers of the state that was saved.

    Raises:
        BadCheckpoint: It is damaged, or its chunks are stored in a way that is not known here.
    """

    def __init__(self, file: BinaryIO, name: str, part: Callable[[str], BinaryIO]) -> None:
        self.name = name
        self._beside = name[: name.rfind("/") + 1]
        self._part = part
        size = file.seek(0, 2)
        if size > LARGEST_PICKLE:
            raise BadCheckpoint(f"{name} has {size} bytes; at most {LARGEST_PICKLE} are read")
        metadata = describe(OpenFile(file, name).read(Extent(0, size)), name)
        try:
            self.tensors, self.paths, self._chunks = _read(metadata)
        except _MISSHAPEN as error:
            raise BadCheckpoint(f"{name} is not as torch.distributed.checkpoint writes it: {error}") from error

    def state(self) -> Any:
        """Containers as they were, as far as their names show; tensors described, values read."""
        flat = {key: tensor or self._value(key) for key, tensor in self.tensors.items()}
        return nested(flat, self.paths)

    def chunks(self, key: str) -> list[Chunk]:
        """The chunks of a tensor or a value."""
        return self._chunks.get(key, [])

    def only_chunk(self, key: str) -> Chunk:
        """The chunk of a value; raises BadCheckpoint if there is not exactly one."""
        chunks = self.chunks(key)
        if len(chunks) != 1:
            raise BadCheckpoint(f"{self.name} stores {key!r} in {len(chunks)} places")
        return chunks[0]

    def piece(self, chunk: Chunk) -> Archive:
        """The archive of a chunk; raises BadCheckpoint if it is not there, or damaged."""
        return Archive(io.BytesIO(self.read(chunk)), self.named(chunk))

    def read(self, chunk: Chunk) -> bytearray:
        """The bytes of the archive of a chunk."""
        with self._part(chunk.file) as file:
            return OpenFile(file, self._beside + chunk.file).read(chunk.extent)

    def named(self, chunk: Chunk) -> str:
        """The archive of a chunk, in errors."""
        return f"{self._beside}{chunk.file} at {chunk.extent.offset}"

    def _value(self, key: str) -> Any:
        """A value that is no tensor; tensors within it have storages of their own."""
        return _renamed(self.piece(self.only_chunk(key)).state(), f"{key}/")


def nested(flat: Mapping[str, Any], paths: Mapping[str, tuple[Any, ...]]) -> Any:
    """The containers that were made flat: dictionaries, and lists where a path has numbers."""
    root: dict[Any, Any] = {}
    lists: list[tuple[dict[Any, Any], Any]] = []
    for key, value in flat.items():
        node, path = root, paths.get(key) or (key,)
        for step, following in pairwise(path):
            if step not in node and isinstance(following, int):
                lists.append((node, step))
            node = node.setdefault(step, {})
            if not isinstance(node, dict):
                raise BadCheckpoint(f"{key!r} is stored within another value")
        node[path[-1]] = value
    for node, step in reversed(lists):  # the innermost first
        node[step] = [node[step][i] for i in sorted(node[step])]
    return root


def _read(metadata: Any) -> tuple[dict[str, Tensor | None], dict[str, tuple[Any, ...]], dict[str, list[Chunk]]]:
    """Tensors (None for other values), paths and chunks by key."""
    fields = dict(metadata.state)
    tensors = {str(key): _tensor(str(key), entry) for key, entry in fields["state_dict_metadata"].items()}
    planned = fields.get("planner_data")
    paths = {str(k): _path(k, path) for k, path in planned.items()} if isinstance(planned, Mapping) else {}
    sizes = {key: _sizes(entry) for key, entry in fields["state_dict_metadata"].items()}
    chunks: dict[str, list[Chunk]] = {}
    for index, place in fields["storage_data"].items():
        key, where = index.state["fqn"], place.state
        if where.get("transform_descriptors"):
            raise ValueError(f"{key!r} was transformed by {where['transform_descriptors']}, such as compressed")
        offsets = tuple(index.state.get("offset") or ())
        chunk = Chunk(offsets, sizes[key].get(offsets, ()), where["relative_path"], _extent(where))
        chunks.setdefault(key, []).append(chunk)
    return tensors, paths, chunks


def _path(key: Any, path: Any) -> tuple[str | int, ...]:
    """The path to a value: names and numbers, and nothing that no dict could have as a key."""
    if not isinstance(path, list | tuple) or any(type(step) not in (str, int) for step in path):
        raise ValueError(f"the path to {key!r} has more than names and numbers")
    return tuple(path)


def _extent(where: Mapping[str, Any]) -> Extent:
    offset, length = where["offset"], where["length"]
    if type(offset) is not int or type(length) is not int or not 0 <= length <= 1 << 60:
        raise ValueError(f"something has {length} bytes at {offset}")
    return Extent(offset, length)


def _sizes(entry: Object) -> dict[tuple[int, ...], tuple[int, ...]]:
    """The shape of each chunk of a tensor, by where it begins."""
    fields = entry.state if isinstance(entry.state, Mapping) else {}
    return {tuple(chunk.state["offsets"]): tuple(chunk.state["sizes"]) for chunk in fields.get("chunks", ())}


def _tensor(key: str, entry: Object) -> Tensor | None:
    if not entry.name.endswith(".TensorStorageMetadata"):
        return None
    shape = tuple(entry.state["size"])
    dtype = str(name_of(entry.state["properties"].state[0])).removeprefix("torch.")
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"{key!r} has the shape {shape}")
    stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    return Tensor(dtype, shape, stride, 0, Storage(key, dtype, prod(shape), "cpu"))


def _renamed(node: Any, prefix: str) -> Any:
    """A value; the storages of its tensors have other names than those of other values."""
    match node:
        case Tensor(storage=Storage() as storage):
            return replace(node, storage=replace(storage, key=prefix + storage.key))
        case dict():
            return {key: _renamed(value, prefix) for key, value in node.items()}
        case list() | tuple():
            return type(node)([_renamed(value, prefix) for value in node])
    return node
