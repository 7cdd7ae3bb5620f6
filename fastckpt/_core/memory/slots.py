"""The records of a slot: its directory alone shows whether it is committed."""

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fastckpt._core.format.ids import LARGEST, SaveId
from fastckpt._core.format.manifest import COMMON, METADATA, OF_EACH_NODE
from fastckpt._core.memory.records import if_there, names_in, read_record, read_records, remove_any, write_record

_BEGIN = ".begin"
_DONE = ".done-"
_DIGESTS = ".digests"
LONGEST_NAME = 200
"""Bytes that the name of an image may have, with the directories of the slot that it is in."""
_NUMBER = re.compile("0|[1-9][0-9]{0,8}")
_DIGEST = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True)
class SlotBegin:
    """A save was begun in the slot: its id, and the local ranks that must write their part."""

    id: SaveId
    writers: frozenset[int]


@dataclass(frozen=True)
class SlotDone:
    """A writer has filled its images.

    Attributes:
        id: The save that they belong to.
        files: Their names and sizes in bytes.
        details: Values that the writer wants kept with the checkpoint (JSON): its parent, the user's path, threads.
    """

    id: SaveId
    files: dict[str, int]
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Records:
    """All records of a slot, read at one time.

    Attributes:
        committed: The id of the whole checkpoint in the slot; None if there is none, and then the others are empty.
        files: Names and sizes in bytes of the images of the committed checkpoint.
        details: Values that the writers kept with it; for equal keys those of the first local rank.
        digests: Digests (xxh3-128, in hexadecimal) of its images, by name; {} until it has some.
    """

    begin: SlotBegin | None
    done: dict[int, SlotDone]
    committed: SaveId | None
    files: dict[str, int]
    details: dict[str, Any]
    digests: dict[str, str]

    @property
    def common(self) -> Sequence[str]:
        """The files of the committed checkpoint that each node has of its own, with equal contents."""
        return self.details.get(OF_EACH_NODE, COMMON)  # type: ignore[no-any-return]


def begin(slot: Path, record: SlotBegin) -> set[str]:
    """Make the slot one of this save: its old save no longer counts before its images change.

    Returns images of writers that are no more, as after a restart with fewer: discard them, which may take a while.
    """
    left = _images_of_others(slot, record.writers)
    clear(slot)
    write_record(slot / _BEGIN, {"id": list(record.id), "writers": sorted(record.writers)})
    return left


def _images_of_others(slot: Path, writers: frozenset[int]) -> set[str]:
    numbers = [name.removeprefix(_DONE) for name in names_in(slot) if name.startswith(_DONE)]
    if all(int(number) in writers for number in numbers if _NUMBER.fullmatch(number)):
        return set()
    files = {writer: done.files.keys() for writer, done in read(slot).done.items()}
    kept = {name for writer in files.keys() & writers for name in files[writer]}
    return {name for writer in files.keys() - writers for name in files[writer]} - kept


def clear(slot: Path) -> None:
    """Make the slot one that holds no checkpoint."""
    # Digests first: digests of one save must never be in a slot with another.
    for name in sorted(names_in(slot), key=lambda name: name != _DIGESTS):
        if name == _DIGESTS or name.startswith(_DONE):
            _invalidate(slot / name)
    _invalidate(slot / _BEGIN)


def _invalidate(record: Path) -> None:
    try:
        remove_any(record)
    except OSError:  # an empty one counts as none
        fd = os.open(record, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.ftruncate(fd, 0)
        finally:
            os.close(fd)


def commit(slot: Path, writer: int, record: SlotDone) -> None:
    """Declare that all images of a writer are filled; the last writer's record commits the slot."""
    content = {"id": list(record.id), "files": record.files, "details": record.details}
    write_record(slot / f"{_DONE}{writer}", content)


def write_digests(slot: Path, id: SaveId, digests: dict[str, str]) -> None:
    """Write the digests of a committed save; only the arena's owner may, while the slot cannot be begun again.

    Args:
        slot: The slot's directory.
        id: The save that is committed in it.
        digests: xxh3-128 in 32 hexadecimal digits, by name of the image.
    """
    write_record(slot / _DIGESTS, {"id": list(id), "digests": digests})


def read_done(slot: Path, writer: int) -> SlotDone | None:
    """Read one writer's record, as `read` does; None if there is none."""
    return _done(read_record(slot / f"{_DONE}{writer}"))


def as_done(part: object, id: SaveId | None) -> SlotDone | None:
    """The files and details of a writer's part, as another process has sent them, as its record; None for others."""
    return _done({**part, "id": list(id)}) if isinstance(part, dict) and id is not None else None


def read_parts(directory: Path) -> dict[int, SlotDone]:
    """All done records in a directory, by the numbers of their writers."""
    numbers = [name.removeprefix(_DONE) for name in names_in(directory) if name.startswith(_DONE)]
    found = {int(number): read_done(directory, int(number)) for number in numbers if _NUMBER.fullmatch(number)}
    return {writer: done for writer, done in found.items() if done}


def read_digests(directory: Path, id: SaveId) -> dict[str, str]:
    """The digests of a save's images in a directory; {} if there are none, or those of another save."""
    save, digests = _digested(read_record(directory / _DIGESTS)) or (None, {})
    return digests if save == id else {}


def read(slot: Path, known: Mapping[int, SlotDone] = MappingProxyType({})) -> Records:
    """Read the records of a slot; files not written by us count as not there. Raises OSError as `read_record`.

    Done records that are ``known`` are not read again, only looked for.
    """
    numbers = [name.removeprefix(_DONE) for name in names_in(slot) if name.startswith(_DONE)]
    writers = [int(number) for number in numbers if _NUMBER.fullmatch(number)]
    unknown = [f"{_DONE}{writer}" for writer in writers if writer not in known]
    *dones, begun, digested = read_records(slot, [*unknown, _BEGIN, _DIGESTS])
    fresh = iter(dones)
    found = {writer: known.get(writer) or _done(next(fresh)) for writer in writers}
    done = {writer: record for writer, record in found.items() if record}
    begin = _begin(begun)
    parts = [done.get(writer) for writer in sorted(begin.writers)] if begin else []
    if begin is None or not parts or any(part is None or part.id != begin.id for part in parts):
        return Records(begin, done, None, {}, {}, {})
    files, details = dict[str, int](), dict[str, Any]()
    for part in filter(None, parts):
        files |= part.files
        details = part.details | details
    save, digests = _digested(digested) or (None, {})
    return Records(begin, done, begin.id, files, details, digests if save == begin.id else {})


def images_in(slot: Path) -> dict[str, int]:
    """Names and sizes in bytes of the images of a slot: the regular files in it but for our records."""
    found = {}
    for name in names_in(slot):
        if name.startswith(".") and name != METADATA:
            continue
        if (size := image_size(slot, name)) is not None:
            found[name] = size
        elif _is_directory(slot / name):
            found |= {f"{name}/{inner}": size for inner, size in images_in(slot / name).items()}
    return found


def image_size(slot: Path, name: str) -> int | None:
    """Bytes of the image of that name; None if there is none: a link, or a file behind one, is none."""
    *above, _ = Path(name).parents
    status = if_there((slot / name).lstat, None)
    if status is None:
        return None
    is_image = stat.S_ISREG(status.st_mode) and all(_is_directory(slot / directory) for directory in above)
    return status.st_size if is_image else None


def _is_directory(path: Path) -> bool:
    status = if_there(path.lstat, None)
    return status is not None and stat.S_ISDIR(status.st_mode)


def discard(slot: Path, names: Iterable[str]) -> None:
    """Remove images of a slot, and the directories that are empty then."""
    for name in names:
        remove_any(slot / name)
        for directory in [*Path(name).parents][:-1]:
            with contextlib.suppress(OSError):  # there is more in it
                (slot / directory).rmdir()


def damage(slot: Path, files: dict[str, int]) -> str:
    """Return a fault of images, by their committed names and sizes; empty for none. It reads no contents."""
    for name, size in files.items():
        status = if_there((slot / name).lstat, None)
        if status is None:
            return f"{slot / name} is not there; it was committed as a file of {size}"
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            kind = stat.filemode(status.st_mode)
            return f"{slot / name} ({kind}) has {status.st_size} bytes; it was committed as a file of {size}"
    return ""


def _begin(record: dict[str, Any]) -> SlotBegin | None:
    match record:
        case {"id": id, "writers": [*writers]} if (save := _save(id)) and all(map(_is_count, writers)):
            return SlotBegin(save, frozenset(writers))
    return None


def _done(record: dict[str, Any]) -> SlotDone | None:
    match record:
        case {"id": id, "files": dict(files), "details": dict(details)} if save := _save(id):
            if all(is_image(name) and _is_count(size) for name, size in files.items()) and _are_details(details):
                return SlotDone(save, files, details)
    return None


def _are_details(details: dict[str, Any]) -> bool:
    """Return whether known details have the types that their readers expect."""
    parent, path = details.get("parent"), details.get("path", "")
    counts = [details.get(name, 1) for name in ("world_size", "rank", "num_threads", "node", "nodes")]
    texts = [path, details.get("attempt", ""), details.get("folder", "")]
    common = details.get(OF_EACH_NODE, [])
    return (
        all(map(_is_count, counts))
        and isinstance(common, list)
        and all(isinstance(text, str) for text in [*texts, *common])
        and (parent is None or _save(parent) is not None)
    )


def _digested(record: dict[str, Any]) -> tuple[SaveId, dict[str, str]] | None:
    match record:
        case {"id": id, "digests": dict(digests)} if save := _save(id):
            if all(is_image(name) and _is_digest(digest) for name, digest in digests.items()):
                return save, digests
    return None


def _save(id: object) -> SaveId | None:
    match id:
        case [int(history), int(step)] if _is_count(history) and _is_count(step):
            return SaveId(history, step)
    return None


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def is_image(name: str) -> bool:
    """Return whether a name can be one of a file inside the slot, and is none of ours; a record may be untrusted."""
    if not name.isprintable() or len(name.encode()) > LONGEST_NAME:
        return False
    *directories, file = name.split("/")
    return (file == METADATA or file[:1] not in ("", ".")) and all(part[:1] not in ("", ".") for part in directories)
