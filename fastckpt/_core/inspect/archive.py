"""A torch.save file as an archive: the offsets of its entries, found without torch and without reading tensors."""

import struct
import zipfile
from dataclasses import dataclass
from typing import Any, BinaryIO

from fastckpt._core.inspect.pickled import describe
from fastckpt.errors import BadCheckpoint

LARGEST_PICKLE = 2**30
"""Bytes above which a pickle is refused: one of a million tensors has about 150 MB."""
_HEADER = struct.Struct("<4s22xHH")
"""The fields used of an entry's local header: its signature, and the lengths of the name and of the extra field."""
_ERRORS = (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, EOFError, OverflowError, struct.error)
"""Exceptions that zipfile can raise for a damaged archive."""


@dataclass(frozen=True)
class Extent:
    """The byte range of an entry in the file."""

    offset: int
    size: int


class OpenFile:
    """An open file.

    Args:
        file: Open for reading and seekable; it may be remote. It stays the caller's to close.
        name: Its name in errors.

    Raises:
        BadCheckpoint: It cannot be read.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.name = name
        self._file = file
        try:
            self._length = file.seek(0, 2)
        except (OSError, ValueError) as error:
            raise BadCheckpoint(f"{name} cannot be read: {error}") from error

    def byteorder(self) -> str:
        """The order of bytes in its tensors: "little" or "big"."""
        return "little"

    def read(self, extent: Extent) -> bytearray:
        """The bytes of an extent; raises BadCheckpoint if they are not all there."""
        if not 0 <= extent.offset <= self._length - extent.size:
            raise BadCheckpoint(
                f"{self.name} is cut off: it has {self._length} bytes, but {extent.size} were to be at {extent.offset}"
            )
        data = bytearray(extent.size)
        with memoryview(data) as view:
            try:
                self._file.seek(extent.offset)
                done = 0
                while done < extent.size and (count := self._file.readinto(view[done:])):  # type: ignore[attr-defined]
                    done += count
            except (OSError, ValueError) as error:
                raise BadCheckpoint(f"{self.name} cannot be read: {error}") from error
        if done != extent.size:
            raise BadCheckpoint(f"{self.name} became shorter while it was read")
        return data


class Archive(OpenFile):
    """An open torch.save file.

    Checksums of entries are not looked at: numbers are written into an image in place, and torch's reader does not
    look at them either. Manifests have the digest of the whole file.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        super().__init__(file, name)
        try:
            with zipfile.ZipFile(file) as archive:
                self._entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        except _ERRORS as error:
            raise BadCheckpoint(f"{name} is no torch.save file (a zip archive): {error}") from error

    def state(self) -> Any:
        """Its state: containers and values as they are; tensors and all else described."""
        return describe(self.pickled(), self.name)

    def pickled(self) -> bytearray:
        """The pickle of the state; raises BadCheckpoint if there is none, or none of a sane size."""
        extent = self.extent("data.pkl")
        if extent.size > LARGEST_PICKLE:
            raise BadCheckpoint(f"the pickle in {self.name} has {extent.size} bytes; at most {LARGEST_PICKLE} are read")
        return self.read(extent)

    def byteorder(self) -> str:
        """Byte order that torch.save recorded."""
        if "byteorder" not in self._entries:
            return "little"
        return self.read(self.extent("byteorder")).decode(errors="replace")

    def stored(self, key: str) -> Extent:
        """The byte range of a storage."""
        return self.extent(f"data/{key}")

    def extent(self, entry: str) -> Extent:
        """The byte range of an entry, such as ``data/0``, the first storage; raises BadCheckpoint without one."""
        info = self._entries.get(entry)
        if info is None:
            raise BadCheckpoint(f"{self.name} has no entry {entry!r}: it is damaged, or not of torch.save")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise BadCheckpoint(f"entry {entry!r} of {self.name} is compressed or encrypted; torch.save does neither")
        header = self.read(Extent(info.header_offset, _HEADER.size))
        mark, name, extra = _HEADER.unpack(header)
        if mark != b"PK\3\4":
            raise BadCheckpoint(f"{self.name} is damaged: there is no entry at {info.header_offset}, but {mark!r}")
        return Extent(info.header_offset + _HEADER.size + name + extra, info.file_size)
