"""Reads the elements of tensors from a file piece by piece, so that no state has to fit into memory."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from math import prod
from types import TracebackType

import torch

from fastckpt.errors import BadCheckpoint
from fastckpt.storage.reading import digest_of, open_file
from fastckpt.tools.archive import Extent
from fastckpt.tools.contents import contents
from fastckpt.tools.inventory import File
from fastckpt.tools.pickled import Tensor
from fastckpt.tools.tree import Tree, tree_of

BLOCK = 2**21
"""Elements that are read at once."""
_AS_NUMBERS = {"qint8": torch.int8, "quint8": torch.uint8, "qint32": torch.int32}
_PACKED = ("quint4x2", "quint2x4")


class StateFile(AbstractContextManager["StateFile"]):
    """A file of a checkpoint, open to read its tree and the elements of its tensors; no pickled code is run.

    Raises:
        BadCheckpoint: It is not there, or damaged.
    """

    def __init__(self, file: File) -> None:
        self.path = path = str(file.path)
        self._file = open_file(file.path, file.size)
        try:
            self._contents = contents(self._file, path, lambda: digest_of(file.path, file.size))
            self.tree: Tree = tree_of(self._contents.state(), path)
        except BaseException:
            self._file.close()
            raise

    def blocks(self, tensor: Tensor) -> Iterator[torch.Tensor]:
        """All elements of a tensor in their order, in flat blocks; tensors of one shape are cut alike.

        One whose elements do not lie side by side is read whole. Quantized ones come as their integers, packed ones
        as bytes.

        Raises:
            BadCheckpoint: The file does not hold them.
        """
        if tensor.storage is None or not tensor.count:
            return
        if (order := self._contents.byteorder()) != sys.byteorder:
            raise BadCheckpoint(f"{self.path} has {order}-endian tensors; read it on such a machine")
        stored = self._contents.stored(tensor.storage.key)
        if tensor.dtype in _PACKED:
            tensor = Tensor("uint8", (stored.size,), (1,), 0, tensor.storage)
        dtype = _torch_type(tensor.dtype, self.path)
        for block in self._cut(tensor, dtype, stored):
            seen = torch.conj(block).resolve_conj() if "conj" in tensor.views else block
            yield -seen if "neg" in tensor.views else seen

    def _cut(self, tensor: Tensor, dtype: torch.dtype, stored: Extent) -> Iterator[torch.Tensor]:
        shape, stride = tensor.shape or (1,), tensor.stride or (1,)
        if _lies_side_by_side(shape, stride):
            for index, start, count in _pieces(shape):
                first = sum(i * step for i, step in zip((*index, start), stride, strict=False))
                yield self._elements(dtype, stored, tensor.offset + first, count * prod(shape[len(index) + 1 :]))
            return
        reach = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        whole = self._elements(dtype, stored, tensor.offset, reach).as_strided(shape, stride)
        for index, start, count in _pieces(shape):
            flat = whole[index].narrow(0, start, count).reshape(-1).contiguous()
            yield flat.as_strided(flat.shape, (1,))  # one element is contiguous whatever its stride

    def _elements(self, dtype: torch.dtype, stored: Extent, first: int, count: int) -> torch.Tensor:
        size = dtype.itemsize
        if (first + count) * size > stored.size:
            raise BadCheckpoint(
                f"{self.path} is damaged: a tensor ends at byte {(first + count) * size} of a storage of {stored.size}"
            )
        data = self._contents.read(Extent(stored.offset + first * size, count * size))
        return torch.frombuffer(data, dtype=dtype)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _pieces(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Cut a shape into pieces of at most BLOCK elements: an index, then where to begin behind it, and how many."""
    inner = prod(shape[1:])
    if inner <= BLOCK:
        rows = BLOCK // inner
        yield from (((), start, min(rows, shape[0] - start)) for start in range(0, shape[0], rows))
        return
    for i in range(shape[0]):
        yield from (((i, *index), start, count) for index, start, count in _pieces(shape[1:]))


def _lies_side_by_side(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    wanted = [prod(shape[i + 1 :]) for i in range(len(shape))]
    return all(size == 1 or step == want for size, step, want in zip(shape, stride, wanted, strict=True))


def _torch_type(name: str, path: str) -> torch.dtype:
    dtype = _AS_NUMBERS.get(name) or getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise BadCheckpoint(f"{path} has tensors of {name}, which torch {torch.__version__} does not know")
    return dtype
