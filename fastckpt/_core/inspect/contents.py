"""Contents of a checkpoint file by its format: torch.save, safetensors, JSON, or unknown bytes."""

import contextlib
import json
import struct
from collections.abc import Callable
from math import prod
from pathlib import PurePath
from typing import Any, BinaryIO, Protocol

from fastckpt._core.format.types import SAFETENSORS
from fastckpt._core.inspect.archive import Archive, Extent, OpenFile
from fastckpt._core.inspect.pickled import Object, Storage, Tensor, element_size
from fastckpt.errors import BadCheckpoint

_TORCH = (".pt", ".pth", ".bin", ".ckpt")
"""Endings of files that are of torch.save, or damaged."""
_LENGTH = struct.Struct("<Q")
_LARGEST = 100_000_000
"""Bytes, at most, of a safetensors header, as its library reads, and of a JSON file that is parsed."""
_NAMES = {code: name for name, code in SAFETENSORS.items()}


class FileContents(Protocol):
    """A file that is read without running any code that it names; ``name`` is its path, for errors."""

    name: str

    def state(self) -> Any:
        """Containers and values as they are; tensors and all else described."""

    def byteorder(self) -> str:
        """The order of bytes in its tensors: "little" or "big"."""

    def stored(self, key: str) -> Extent:
        """The byte range of a storage."""

    def read(self, extent: Extent) -> bytearray:
        """The bytes of an extent; raises BadCheckpoint if they are not all there."""


def contents(file: BinaryIO, name: str, digest: Callable[[], str] = str) -> FileContents:
    """The contents of an open file, which stays the caller's to close.

    Args:
        file: Open for reading and seekable; it may be remote.
        name: Its path, for errors; its ending counts.
        digest: Gives the digest by which unknown bytes are compared.

    Raises:
        BadCheckpoint: It is damaged.
    """
    ending = PurePath(name).suffix
    if ending == ".safetensors":
        return _Safetensors(file, name)
    other = _Other(file, name, digest)
    is_archive = other.begins_with(b"PK\3\4") and ending != ".distcp"  # this is many files of torch.save in a row
    return Archive(file, name) if ending in _TORCH or is_archive else other


class _Other(OpenFile):
    """A file without tensors."""

    def __init__(self, file: BinaryIO, name: str, digest: Callable[[], str]) -> None:
        super().__init__(file, name)
        self._digest = digest

    def begins_with(self, mark: bytes) -> bool:
        return self._length >= len(mark) and self.read(Extent(0, len(mark))) == mark

    def state(self) -> Any:
        """JSON as it is; all else as its length and digest."""
        if PurePath(self.name).suffix == ".json" and self._length <= _LARGEST:
            with contextlib.suppress(ValueError, RecursionError):
                return json.loads(self.read(Extent(0, self._length)))
        return Object(f"{self._length} bytes {self._digest()}")

    def stored(self, key: str) -> Extent:
        raise BadCheckpoint(f"{self.name} has no tensors")


class _Safetensors(OpenFile):
    """A safetensors file: a header of JSON, then the tensors' bytes."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        super().__init__(file, name)
        length = int.from_bytes(self.read(Extent(0, _LENGTH.size)), "little")
        if length > _LARGEST:
            raise BadCheckpoint(f"{name} is damaged: its header would have {length} bytes; at most {_LARGEST} are read")
        try:
            header = dict(json.loads(self.read(Extent(_LENGTH.size, length))))
            self._metadata = header.pop("__metadata__", {})
            self._tensors = {key: _tensor(key, entry) for key, entry in header.items()}
            self._extents = {
                key: Extent(_LENGTH.size + length + entry["data_offsets"][0], self._tensors[key].size)
                for key, entry in header.items()
            }
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise BadCheckpoint(f"{name} is no safetensors file: {error}") from error

    def state(self) -> Any:
        return self._tensors | ({"__metadata__": self._metadata} if self._metadata else {})

    def stored(self, key: str) -> Extent:
        return self._extents[key]


def _tensor(key: str, entry: dict[str, Any]) -> Tensor:
    """The tensor that a header entry describes; raises ValueError if the entry is inconsistent."""
    dtype, shape, (begin, end) = _NAMES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
    stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    tensor = Tensor(dtype, shape, stride, 0, Storage(key, dtype, prod(shape), "cpu"))
    if min(begin, *shape, 0) < 0 or end - begin != tensor.count * element_size(dtype):
        raise ValueError(f"tensor {key!r} of {dtype} {list(shape)} has bytes {begin} to {end}")
    return tensor
