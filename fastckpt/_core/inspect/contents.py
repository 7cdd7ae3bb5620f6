"""Contents of a checkpoint file by its format: torch.save, safetensors, JSON, or unknown bytes."""

import contextlib
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import PurePath
from typing import Any, BinaryIO, Protocol

from fastckpt._core.format.types import SAFETENSORS
from fastckpt._core.inspect.archive import Archive, Extent, OpenFile
from fastckpt._core.inspect.pickled import Object, Storage, Tensor
from fastckpt.errors import BadCheckpoint

_TORCH = (".pt", ".pth", ".bin", ".ckpt")
"""Endings of files that are of torch.save, or damaged."""
_LENGTH = struct.Struct("<Q")
_LARGEST = 100_000_000
"""Bytes, at most, of a safetensors header, as its library reads, and of a JSON file that is parsed."""
_DIMENSIONS = 64
"""Dimensions of a tensor, at most, as in torch."""
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
    """A safetensors file: a header of JSON, then the tensors' bytes; refused where its library refuses it."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        super().__init__(file, name)
        length = int.from_bytes(self.read(Extent(0, _LENGTH.size)), "little")
        if length > _LARGEST:
            raise BadCheckpoint(f"{name} is damaged: its header would have {length} bytes; at most {_LARGEST} are read")
        start = _LENGTH.size + length
        try:
            header = json.loads(self.read(Extent(_LENGTH.size, length)).decode(), object_pairs_hook=_once)
            if type(header) is not dict:
                raise TypeError(f"its header is a {type(header).__name__}")
            self._metadata = _texts(header.pop("__metadata__", {}))
            self._tensors = {key: _tensor(key, entry) for key, entry in header.items()}
            places = {key: entry["data_offsets"] for key, entry in header.items()}
            _check_places(places, self._length - start)
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise BadCheckpoint(f"{name} is no safetensors file: {str(error)[:500]}") from error
        self._extents = {key: Extent(start + begin, end - begin) for key, (begin, end) in places.items()}

    def state(self) -> Any:
        return self._tensors | ({"__metadata__": self._metadata} if self._metadata else {})

    def stored(self, key: str) -> Extent:
        return self._extents[key]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object with names that can be written, each of which occurs once; else ValueError."""
    found = dict(pairs)
    "".join(found).encode()
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice in it")
    return found


def _texts(metadata: Any) -> dict[str, str]:
    if type(metadata) is not dict or any(type(text) is not str for text in metadata.values()):
        raise TypeError("its __metadata__ are no texts by name")
    "".join(metadata.values()).encode()
    return metadata


def _check_places(places: Mapping[str, Sequence[int]], size: int) -> None:
    """Raise ValueError unless tensors lie side by side, and fill the ``size`` bytes after the header."""
    reached = 0
    for key, (begin, end) in sorted(places.items(), key=lambda place: tuple(place[1])):
        if begin != reached:
            raise ValueError(f"tensor {key[:100]!r} begins at byte {begin}, and the one before it ends at {reached}")
        reached = end
    if reached != size:
        raise ValueError(f"its tensors end at byte {reached}, and the file at {size}")


def _tensor(key: str, entry: dict[str, Any]) -> Tensor:
    """The tensor that a header entry describes; raises ValueError or TypeError if the entry is inconsistent."""
    dtype, shape, (begin, end) = _NAMES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    numbers = (*shape, begin, end)
    # Before any product: of large numbers it takes for ever.
    if type(shape) is not list or len(shape) > _DIMENSIONS or not all(map(_is_int64, numbers)):
        raise TypeError(f"tensor {key[:100]!r} has a shape or offsets that cannot be")
    stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    tensor = Tensor(dtype, tuple(shape), stride, 0, Storage(key, dtype, prod(shape), "cpu"))
    if end - begin != tensor.size:
        raise ValueError(f"tensor {key[:100]!r} of {dtype} {shape} has bytes {begin} to {end}")
    return tensor


def _is_int64(number: object) -> bool:
    return type(number) is int and 0 <= number < 1 << 63
