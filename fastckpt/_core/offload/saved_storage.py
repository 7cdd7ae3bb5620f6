"""Bytes that a graph saved for its backward: in memory, on the way to a file, in it, or on the way back."""

import enum
from dataclasses import dataclass

import torch

from fastckpt._core.offload.codecs import EncodedForm
from fastckpt._core.offload.regions import Region
from fastckpt._core.offload.transfers import Written
from fastckpt._core.torch_private.tensors import storage_key, version_of


class Place(enum.Enum):
    """State of a storage's bytes; `ActivationStore` moves them, under its lock.

    RESIDENT stays: it was not chosen, or could not be written. WAITING -> WRITING -> STORED is the way out, and
    STORED -> REQUESTED -> READING -> FETCHED -> STORED the way in, any number of times.
    """

    RESIDENT = enum.auto()
    WAITING = enum.auto()
    WRITING = enum.auto()
    STORED = enum.auto()
    REQUESTED = enum.auto()
    READING = enum.auto()
    FETCHED = enum.auto()


@dataclass(frozen=True)
class ByteSpan:
    """Bytes of a storage that are saved for a tensor: all, unless the tensor reaches over less than half of them."""

    start: int
    end: int

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self.end - self.start


def span_of(tensor: torch.Tensor, storage: torch.UntypedStorage) -> ByteSpan:
    """The bytes to save for a tensor, from its first element to its last, or the whole storage."""
    width = tensor.element_size()
    start = int(tensor.storage_offset()) * width
    reach = 1 + sum((size - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = start + reach * width if tensor.numel() else start
    whole = storage.nbytes()
    return ByteSpan(start, end) if 2 * (end - start) < whole else ByteSpan(0, whole)


Identity = tuple[int, int, ByteSpan]


def identity_of(tensor: torch.Tensor, storage: torch.UntypedStorage, span: ByteSpan) -> Identity:
    """Return an identity that two saved tensors share exactly if they have the same bytes.

    It holds as long as a `SavedStorage` of one of them lives.
    """
    return storage_key(storage), version_of(tensor), span


class ResidentBytes:
    """Bytes of a storage that are counted as resident, for objects that outlive it."""

    __slots__ = ("counted",)

    def __init__(self) -> None:
        self.counted = 0


class SavedStorage:
    """The bytes of a storage, or of one view, for all the packed tensors that share them.

    It lives as long as one of these does, or as a thread transfers it. Its death frees the region, in any thread.
    """

    __slots__ = (
        "__weakref__",
        "as_dtype",
        "device",
        "form",
        "handed",
        "memory",
        "packs",
        "place",
        "ready",
        "region",
        "resident",
        "span",
        "versions",
        "written",
    )

    def __init__(self, tensor: torch.Tensor, storage: torch.UntypedStorage, span: ByteSpan) -> None:
        self.resident: ResidentBytes | None = None
        self.region: Region | None = None
        self.span = span
        self.device = tensor.device
        self.as_dtype = tensor.dtype
        self.place = Place.RESIDENT
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self.memory: torch.Tensor | None = flat.set_(storage, span.start, (span.size,), (1,))
        self.versions: torch.Tensor | None = None
        """Tensor with the version counter of the memory, if that is a copy; None: the saved tensors have it."""
        self.ready: torch.cuda.Event | None = None
        self.form: EncodedForm | None = None
        """Encoding of its bytes in the file; None: none."""
        self.written: list[Written] = []
        """Positions of its bytes, or of the parts of its encoded form, in the file."""
        self.packs = 0
        """Packed tensors that were made of it."""
        self.handed = 0
        """Times that a packed tensor was unpacked since it was fetched."""

    @property
    def size(self) -> int:
        """Bytes in memory."""
        return self.span.size

    @property
    def is_whole(self) -> bool:
        """True if the memory that it was made of is still as large as it was."""
        memory = self.memory
        return memory is not None and memory.untyped_storage().nbytes() >= memory.storage_offset() + memory.numel()

    def view(self, dtype: torch.dtype, layout: "ViewLayout") -> torch.Tensor:
        """A tensor in these bytes; they must be in memory."""
        assert self.memory is not None
        start = self.memory.storage_offset() + layout.offset - self.span.start
        assert start % dtype.itemsize == 0, "a tensor begins between two elements"
        tensor = torch.empty(0, dtype=dtype, device=self.device)
        return tensor.set_(self.memory.untyped_storage(), start // dtype.itemsize, layout.shape, layout.stride)


@dataclass(frozen=True)
class ViewLayout:
    """Position and layout of a tensor's elements in a storage; the offset is in bytes."""

    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
