"""The records of a slot: what makes it committed is a fact of its directory."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastckpt.format.ids import SaveId

_BEGIN = ".begin"
_DONE = ".done-"


@dataclass(frozen=True)
class Begin:
    """A save was begun in the slot: its id, and the local ranks that must write their part."""

    id: SaveId
    writers: frozenset[int]


@dataclass(frozen=True)
class Done:
    """A writer has filled its images.

    Attributes:
        id: The save that they belong to.
        files: Their names and sizes in bytes.
        details: What the writer wants kept with the checkpoint (JSON): its parent, the user's path, threads.
    """

    id: SaveId
    files: dict[str, int]
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Records:
    """All records of a slot, read at one time."""

    begin: Begin | None
    done: dict[int, Done]

    @property
    def committed(self) -> SaveId | None:
        """The id of the whole checkpoint in the slot; None if there is none."""
        if self.begin is None:
            return None
        ids = {writer: done.id for writer, done in self.done.items()}
        whole = all(ids.get(writer) == self.begin.id for writer in self.begin.writers)
        return self.begin.id if whole and self.begin.writers else None

    @property
    def files(self) -> dict[str, int]:
        """Names and sizes in bytes of the images of the committed checkpoint."""
        assert self.begin is not None
        return {name: size for w in sorted(self.begin.writers) for name, size in self.done[w].files.items()}

    @property
    def details(self) -> dict[str, Any]:
        """What the writers kept with the checkpoint; the first local rank speaks last."""
        assert self.begin is not None
        merged: dict[str, Any] = {}
        for writer in sorted(self.begin.writers, reverse=True):
            merged |= self.done[writer].details
        return merged


def begin(slot: Path, record: Begin) -> None:
    """Make the slot one of this save: what it held stops to count before its images change."""
    for path in sorted(slot.glob(".done-*")):
        path.unlink()
    (slot / _BEGIN).unlink(missing_ok=True)
    _write(slot / _BEGIN, {"id": list(record.id), "writers": sorted(record.writers)})


def clear(slot: Path) -> None:
    """Make the slot one that holds no checkpoint."""
    (slot / _BEGIN).unlink(missing_ok=True)
    for path in sorted(slot.glob(".done-*")):
        path.unlink()


def commit(slot: Path, writer: int, record: Done) -> None:
    """Declare that all images of a writer are filled; the last writer's record commits the slot."""
    _write(slot / f"{_DONE}{writer}", {"id": list(record.id), "files": record.files, "details": record.details})


def read(slot: Path) -> Records:
    """Read the records of a slot; what cannot be read counts as not there."""
    writers = [path.name.removeprefix(_DONE) for path in slot.glob(".done-*")]
    done = {int(writer): _done(_read(slot / f"{_DONE}{writer}")) for writer in writers if writer.isdecimal()}
    return Records(_begin(_read(slot / _BEGIN)), {writer: record for writer, record in done.items() if record})


def _begin(record: dict[str, Any]) -> Begin | None:
    match record:
        case {"id": [int(history), int(step)], "writers": [*writers]} if all(type(w) is int for w in writers):
            return Begin(SaveId(history, step), frozenset(writers))
    return None


def _done(record: dict[str, Any]) -> Done | None:
    match record:
        case {"id": [int(history), int(step)], "files": dict(files), "details": dict(details)}:
            if all(type(size) is int for size in files.values()):
                return Done(SaveId(history, step), files, details)
    return None


def _write(path: Path, record: dict[str, Any]) -> None:
    """Write a record so that it is there whole or not at all, whenever the writer dies."""
    temporary = path.with_name(f".tmp{path.name}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(fd, json.dumps(record).encode())
    finally:
        os.close(fd)
    temporary.rename(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
