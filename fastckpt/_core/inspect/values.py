"""Reads the elements of tensors from a file piece by piece, so that no state has to fit into memory."""

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch

from fastckpt._core.inspect.archive import Extent
from fastckpt._core.inspect.contents import FileContents, contents
from fastckpt._core.inspect.distcp_state import Chunk, Distributed, nested
from fastckpt._core.inspect.inventory import InventoryFile
from fastckpt._core.inspect.pickled import Tensor
from fastckpt._core.inspect.tree import Tree, tree_of
from fastckpt._core.storage.reading import digest_of, open_file
from fastckpt.errors import BadCheckpoint

BLOCK = 2**21
"""Elements that are read at once."""
_AS_NUMBERS = {"qint8": torch.int8, "quint8": torch.uint8, "qint32": torch.int32}
_PACKED = ("quint4x2", "quint2x4")


def elements(contents: FileContents, tensor: Tensor) -> Iterator[torch.Tensor]:
    """All elements of a tensor in their order, in flat blocks; tensors of one shape are cut alike.

    One whose elements are not contiguous is read whole. Quantized ones come as their integers, packed ones as bytes.

    Raises:
        BadCheckpoint: The file does not hold them.
    """
    if tensor.storage is None or not tensor.count:
        return
    if (order := contents.byteorder()) != sys.byteorder:
        raise BadCheckpoint(f"{contents.name} has {order}-endian tensors; read it on such a machine")
    stored = contents.stored(tensor.storage.key)
    if tensor.dtype in _PACKED:
        tensor = Tensor("uint8", (stored.size,), (1,), 0, tensor.storage)
    for block in _cut(contents, tensor, stored):
        seen = torch.conj(block).resolve_conj() if "conj" in tensor.views else block
        yield -seen if "neg" in tensor.views else seen


def _cut(contents: FileContents, tensor: Tensor, stored: Extent) -> Iterator[torch.Tensor]:
    dtype = _torch_type(tensor.dtype, contents.name)

    def read(first: int, count: int) -> torch.Tensor:
        end = (first + count) * dtype.itemsize
        if end > stored.size:
            raise BadCheckpoint(
                f"{contents.name} is damaged: a tensor ends at byte {end} of a storage of {stored.size}"
            )
        data = contents.read(Extent(stored.offset + first * dtype.itemsize, count * dtype.itemsize))
        return torch.frombuffer(data, dtype=dtype)

    shape, stride = tensor.shape or (1,), tensor.stride or (1,)
    if _is_contiguous(shape, stride):
        for index, start, count in _pieces(shape):
            first = sum(i * step for i, step in zip((*index, start), stride, strict=False))
            yield read(tensor.offset + first, count * prod(shape[len(index) + 1 :]))
        return
    reach = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    whole = read(tensor.offset, reach).as_strided(shape, stride)
    for index, start, count in _pieces(shape):
        flat = whole[index].narrow(0, start, count).reshape(-1).contiguous()
        yield flat.as_strided(flat.shape, (1,))  # one element is contiguous with any stride


class StateFile(AbstractContextManager["StateFile"]):
    """A file of a checkpoint, open to read its tree and the elements of its tensors; no pickled code is run.

    Args:
        file: The file.
        on_digested: Is called with each number of bytes of a file without tensors, of which a digest is made.

    Raises:
        BadCheckpoint: It is not there, or damaged.
    """

    def __init__(self, file: InventoryFile, on_digested: Callable[[int], None] | None = None) -> None:
        self._on_digested = on_digested
        self.path = path = str(file.path)
        self._file = open_file(file.path, file.size)
        try:
            self.tree: Tree = tree_of(self._look(file), path)
        except BaseException:
            self._file.close()
            raise

    def _look(self, file: InventoryFile) -> Any:
        if file.has_parts:
            whole = Distributed(self._file, self.path, lambda name: _part(file, name))
            self._contents: Chunks | FileContents = Chunks(whole)
            return whole.state()
        self._contents = contents(self._file, self.path, lambda: digest_of(file.path, file.size, self._on_digested))
        return self._contents.state()

    def blocks(self, tensor: Tensor) -> Iterator[torch.Tensor]:
        """All elements of a tensor in their order, as `elements` gives them."""
        if isinstance(self._contents, Chunks):
            return self._contents.blocks(tensor)
        return elements(self._contents, tensor)

    def gathered(self, on_read: Callable[[int], None]) -> Any:
        """The state of a DCP checkpoint, whole, in memory; ``on_read`` is called with the bytes of each chunk."""
        assert isinstance(self._contents, Chunks)
        return self._contents.gathered(on_read)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Chunks:
    """The elements of tensors in the chunks of a DCP checkpoint; one tensor at a time is in memory."""

    def __init__(self, whole: Distributed) -> None:
        self._whole = whole

    def blocks(self, tensor: Tensor) -> Iterator[torch.Tensor]:
        """All elements of a tensor, cut as `elements` cuts them; raises BadCheckpoint if they are not there."""
        if tensor.storage is None or not tensor.count:
            return
        key, slash, own = tensor.storage.key.rpartition("/")
        [value] = self._whole.chunks(key) if slash and len(self._whole.chunks(key)) == 1 else [None]
        if value is not None and not self._whole.chunks(tensor.storage.key):  # within a value that is no tensor
            within = replace(tensor, storage=replace(tensor.storage, key=own))
            yield from elements(self._whole.piece(value), within)
            return
        shape = tensor.shape or (1,)
        whole = self.tensor(tensor).reshape(shape)
        for index, start, count in _pieces(shape):
            yield whole[index].narrow(0, start, count).reshape(-1)

    def gathered(self, on_read: Callable[[int], None]) -> Any:
        """The whole state."""
        tensors = self._whole.tensors.items()
        flat = {key: self.tensor(one, on_read) if one else self._value(key) for key, one in tensors}
        return nested(flat, self._whole.paths)

    def _value(self, key: str) -> Any:
        return self._loaded(self._whole.only_chunk(key))

    def _loaded(self, chunk: Chunk) -> Any:
        return load(io.BytesIO(self._whole.read(chunk)), self._whole.named(chunk))

    def tensor(self, tensor: Tensor, on_read: Callable[[int], None] = lambda _: None) -> torch.Tensor:
        """All of a tensor."""
        assert tensor.storage is not None
        key = tensor.storage.key
        made, found = _allocated(tensor, self._whole.name), 0
        for chunk in self._whole.chunks(key):
            part = self._loaded(chunk)
            if isinstance(part, torch.Tensor) and part.is_quantized:
                part = part.int_repr()
            if not isinstance(part, torch.Tensor) or part.shape != chunk.sizes or part.dtype != made.dtype:
                raise BadCheckpoint(f"{self._whole.named(chunk)} has no part of {key!r} of shape {list(chunk.sizes)}")
            try:
                place = made
                for dimension, (begin, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                    place = place.narrow(dimension, begin, size)
                place.copy_(part)
            except (RuntimeError, ValueError, IndexError) as error:
                raise BadCheckpoint(f"{self._whole.named(chunk)} does not fit into {key!r}: {error}") from error
            found += part.numel()
            on_read(chunk.extent.size)
        if found != tensor.count:
            raise BadCheckpoint(f"{self._whole.name} has {found} of the {tensor.count} elements of {key!r}")
        return made


def load(source: Path | BinaryIO, name: str) -> Any:
    """A state, by torch and without running code that it names; raises BadCheckpoint if that is not possible."""
    try:
        return torch.load(source, map_location="cpu", mmap=isinstance(source, Path), weights_only=True)
    except Exception as error:  # torch's errors for a damaged file are not documented
        raise BadCheckpoint(
            f"{name} cannot be loaded with weights_only=True: {error}. If you trust whoever wrote it, load it with "
            f"torch.load(weights_only=False) and save what you need of it."
        ) from error


def _allocated(tensor: Tensor, name: str) -> torch.Tensor:
    """Memory for a tensor; a damaged file can claim any size."""
    dtype = _torch_type(tensor.dtype, name)
    try:
        return torch.empty(tensor.shape, dtype=dtype)
    except (RuntimeError, TypeError) as error:
        text = str(error).splitlines()[0]
        raise BadCheckpoint(
            f"{name} has a tensor of shape {list(tensor.shape)}, which needs too much memory: {text}"
        ) from error


def _part(file: InventoryFile, name: str) -> BinaryIO:
    """Open a file beside ``.metadata``."""
    if name not in file.parts:
        raise BadCheckpoint(f"{file.path} names {name}, which is not there; several nodes keep theirs each in memory")
    return open_file(file.parts[name].path, file.parts[name].size)


def _pieces(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Cut a shape into pieces of at most BLOCK elements: an index, then the first row after it, and how many rows."""
    inner = prod(shape[1:])
    if inner <= BLOCK:
        rows = BLOCK // inner
        yield from (((), start, min(rows, shape[0] - start)) for start in range(0, shape[0], rows))
        return
    for i in range(shape[0]):
        yield from (((i, *index), start, count) for index, start, count in _pieces(shape[1:]))


def _is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    wanted = [prod(shape[i + 1 :]) for i in range(len(shape))]
    return all(size == 1 or step == want for size, step, want in zip(shape, stride, wanted, strict=True))


def _torch_type(name: str, path: str) -> torch.dtype:
    # Not getattr: torch imports some modules when they are asked for, and the name is a file's.
    dtype = _AS_NUMBERS.get(name) or vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise BadCheckpoint(f"{path} has tensors of {name}, which torch {torch.__version__} does not know")
    return dtype
