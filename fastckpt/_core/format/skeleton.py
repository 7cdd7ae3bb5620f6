"""Writes the file that torch.save would write, all but the bytes of the tensors."""

import hashlib
import io
import itertools
import pickle
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import IO, Any, cast

import torch

from fastckpt._core.format.number_lists import NumberLists, PickledNumbers
from fastckpt._core.format.sink import Sink
from fastckpt._core.format.structure import Number, Opaque, Structure, with_numbers
from fastckpt._core.torch_private.tensors import archive_reader, storage_key, untyped

PAGE = 4096
SLACK = 16384
"""Bytes left free at the end of a new image, so that leaves may grow without a new file."""
MAX_COMMENT = 65535
"""The longest comment that the end record of a zip archive can declare."""


@dataclass(frozen=True)
class Gap:
    """The place of one storage in a file, in bytes."""

    offset: int
    size: int


@dataclass(frozen=True, eq=False)
class Skeleton:
    """A ``torch.save`` file without the bytes of its tensors.

    Attributes:
        segments: Written bytes with their offsets.
        length: Bytes of the whole file.
        gaps: The place of each storage, in the order of the keys in the archive.
        places: The place of each number of the state, in the order in which `Structure` finds them;
            empty if the numbers have no place of their own.
    """

    segments: tuple[tuple[int, bytes], ...]
    length: int
    gaps: tuple[Gap, ...]
    places: tuple[tuple[int, struct.Struct], ...]

    def padding(self, capacity: int) -> tuple[int, bytes]:
        """The offset and the bytes that make the file ``capacity`` bytes long: slack becomes the archive's comment.

        The file must be between `length` and `length` + 65,535 bytes long (see `fits`).
        """
        return self.length - 2, struct.pack("<H", capacity - self.length) + bytes(capacity - self.length)

    def fits(self, capacity: int) -> bool:
        """Return whether a file of ``capacity`` bytes can hold it."""
        return 0 <= capacity - self.length <= MAX_COMMENT

    def capacity(self) -> int:
        """The size of file to make for it, in bytes: whole pages, with some slack."""
        return -(-(self.length + SLACK) // PAGE) * PAGE


def sketch(state: Any) -> tuple[Skeleton, list[torch.UntypedStorage], list[int]]:
    """The skeleton of any state that torch.save takes; the storages that fill its gaps, in their order; and how many
    tensors of the state each of these has.

    A state that refuses ``skip_data`` (quantized and strided nested tensors) comes back whole, without gaps.
    Raises the error of torch.save for a state that it cannot save.
    """
    try:
        sink, met, _ = _skip_data(state)
    except _RefusesToSkip:
        return _whole(state), [], []
    storages = [storage for storage, _ in met]
    skeleton = Skeleton(tuple(sink.segments()), sink.length, _gaps(sink, storages), ())
    return skeleton, storages, [count for _, count in met]


def sketch_structure(state: Any, structure: Structure) -> Skeleton:
    """The skeleton of a state that was taken apart, with places for its numbers.

    Numbers are pickled as unlike values of fixed width, found again in the pickle, and so become places.
    """
    marked, search = _markers(structure.numbers)
    sink, met, lists = _skip_data(with_numbers(state, marked, structure.lists))
    storages = [storage for storage, _ in met]
    gaps = _gaps(sink, storages)
    if [*map(storage_key, storages)] != [*map(storage_key, structure.storages)]:
        raise Opaque("a pickler meets the storages in another order")
    start, size = _record(sink, "data.pkl")
    places = search(sink.cut(start, start + size), start, lists.spans)
    if len(places) != len(structure.numbers):
        raise Opaque("numbers without a place")
    return Skeleton(tuple(sink.segments()), sink.length, gaps, tuple(places))


class _RefusesToSkip(Exception):
    """torch.save cannot leave out the bytes of some tensor in the state."""


def archive(value: Any) -> bytes:
    """The file that torch.save writes of a value."""
    buffer = io.BytesIO()
    _save(value, buffer, {}, NumberLists())
    return buffer.getvalue()


def _save(state: Any, file: IO[bytes], met: dict[str, tuple[torch.UntypedStorage, int]], lists: NumberLists) -> None:
    torch.save(state, file, pickle_module=SimpleNamespace(Pickler=_pickler(met, lists), __name__="pickle"))


def _skip_data(state: Any) -> tuple[Sink, list[tuple[torch.UntypedStorage, int]], NumberLists]:
    sink, lists = Sink(), NumberLists()
    met: dict[str, tuple[torch.UntypedStorage, int]] = {}
    try:
        with torch.serialization.skip_data():
            _save(state, cast(IO[bytes], sink), met, lists)
    except (RuntimeError, NotImplementedError) as error:
        if "skip_data" in str(error):
            raise _RefusesToSkip from error
        raise
    return sink, list(met.values()), lists


def _pickler(met: dict[str, tuple[torch.UntypedStorage, int]], lists: NumberLists) -> type[pickle.Pickler]:
    """A base for torch's own pickler that notes each storage under its key, and how often the pickler meets it.

    Long lists of numbers it does not pickle one by one.
    """

    class Pickler(pickle.Pickler):
        def __init__(self, file: IO[bytes], protocol: int) -> None:
            self._file, self._pickled = file, io.BytesIO()
            super().__init__(self._pickled, protocol)

        def dump(self, obj: Any) -> None:
            super().dump(obj)
            self._file.write(lists.insert(self, self._pickled.getvalue()))

        def __init_subclass__(cls) -> None:
            identify: Callable[[Any, Any], Any] = cls.persistent_id

            def persistent_id(self: Any, obj: Any) -> Any:
                if (marker := lists.marker(obj)) is not None:
                    return marker
                identity = identify(self, obj)
                if identity is not None:
                    times = met[identity[2]][1] if identity[2] in met else 0
                    met[identity[2]] = untyped(obj), times + 1
                return identity

            cls.persistent_id = persistent_id  # type: ignore[method-assign]

    return Pickler


def _whole(state: Any) -> Skeleton:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return Skeleton(((0, buffer.getvalue()),), len(buffer.getvalue()), (), ())


def _gaps(sink: Sink, storages: list[torch.UntypedStorage]) -> tuple[Gap, ...]:
    """The place of each storage, as torch's own reader finds it: never computed, always read back."""
    reader = _reader(sink)
    records = sum(name.startswith("data/") for name in reader.get_all_records())
    if records != len(storages):
        raise RuntimeError(f"the archive has {records} records for {len(storages)} storages; save without fastckpt")
    return tuple(Gap(reader.get_record_offset(f"data/{key}"), storage.nbytes()) for key, storage in enumerate(storages))


def _record(sink: Sink, name: str) -> tuple[int, int]:
    reader = _reader(sink)
    return reader.get_record_offset(name), len(reader.get_record(name))


def _reader(sink: Sink) -> Any:
    sink.seek(0)
    return archive_reader(cast(IO[bytes], sink))


_INT, _FLOAT = struct.Struct("<q"), struct.Struct(">d")
_HIGH_INT, _HIGH_FLOAT = 0x41, 0x41


def _markers(numbers: list[Number]) -> tuple[list[Number], Callable[[bytes, int, list[tuple[int, int]]], list[Any]]]:
    """Unlike numbers to pickle in place of ``numbers``, and the search for their places.

    A marker is eight bytes: a counter, and four bytes that no state has by chance. They depend on the kinds of the
    numbers alone, so that ranks with equal states have equal files: the archive keeps a checksum of the markers. Pickle
    writes an int of that size as LONG1 with eight bytes, little-endian, and a float as BINFLOAT, big-endian. Lists of
    numbers need none: it is known where these are.
    """
    secret = hashlib.sha256(bytes(type(number) is int for number in numbers)).digest()[:3]
    counters = itertools.count()
    marked: list[Number] = []
    for number in numbers:
        counter = next(counters).to_bytes(4, "little")
        if type(number) is PickledNumbers:
            continue
        if type(number) is int:
            marked.append(_INT.unpack(counter + secret + bytes([_HIGH_INT]))[0])
        else:
            marked.append(_FLOAT.unpack(bytes([_HIGH_FLOAT]) + secret + counter)[0])
    tail, head = re.escape(secret + bytes([_HIGH_INT])), re.escape(bytes([_HIGH_FLOAT]) + secret)
    pattern = re.compile(b"\x8a\x08(?P<i>.{4})" + tail + b"|G" + head + b"(?P<f>.{4})", re.DOTALL)

    def search(pickled: bytes, start: int, lists: list[tuple[int, int]]) -> list[tuple[int, struct.Struct]]:
        of_lists = (index for index, number in enumerate(numbers) if type(number) is PickledNumbers)
        found = {
            index: (start + offset, struct.Struct(f"{size}s"))
            for index, (offset, size) in zip(of_lists, lists, strict=True)
        }
        bounds = [0, *itertools.chain.from_iterable((offset, offset + size) for offset, size in lists), len(pickled)]
        between = zip(bounds[::2], bounds[1::2], strict=True)
        for match in itertools.chain.from_iterable(pattern.finditer(pickled, *each) for each in between):
            whole, kind = (match["i"], _INT) if match["i"] is not None else (match["f"], _FLOAT)
            index, offset = int.from_bytes(whole, "little"), start + match.end() - 8
            if index in found:
                return []
            found[index] = (offset, kind)
        return [found[i] for i in range(len(numbers))] if sorted(found) == list(range(len(numbers))) else []

    return marked, search
