"""The paths of a checkpoint directory, and its locks."""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import METADATA, MODEL, NAME, Manifest
from fastckpt._core.io.durable import make_directories
from fastckpt._core.io.modes import open_file
from fastckpt._core.storage.local.stored import read_manifest, with_manifests
from fastckpt.errors import BadCheckpoint, ConfigError, PersistError

PRIVATE = ".fastckpt"
PAGE = 4096
FILES = "files"
"""What is to become a checkpoint's directory, in one of parts."""
REMAINS = "remains"
"""Name of a text in a private path: the place, below the root, of whose manifest this took the only one."""
TRACKER = "latest_checkpointed_iteration.txt"
ABANDONED = 3600.0
"""Seconds without a change after which a sweep takes what was begun for abandoned, where it cannot know."""
SWEEP_DEADLINE = 60.0
"""Seconds that a writer waits for the sweep of another process to end."""

_PLACE = re.compile("checkpoint-[0-9]{1,19}")
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Answers of file systems that have no locks, such as Lustre without the option ``flock``."""
_PARTS = re.compile("parts-([0-9]{1,19})-([0-9]{1,19})-[0-9a-f]{12}")
_RECORD = re.compile("checkpoint-[0-9]{1,19}-[0-9]{1,19}")


class Contents(NamedTuple):
    """What a checkpoint directory holds, by the names there.

    Attributes:
        places: All directories that may hold a manifest of ours, those in place before those that made way.
        quarantined: Places of checkpoints that were found bad.
        parts: The directories in which nodes gather what each has of a checkpoint, and of which one.
        inodes: Those of all directories, by path.
    """

    places: list[Path]
    quarantined: list[Path]
    parts: list[tuple[SaveId, Path]]
    inodes: Mapping[Path, int]


class Layout:
    """The paths of one checkpoint directory, and the lock that tells whether anybody writes to it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.private = root / PRIVATE
        self.tracker = root / TRACKER

    def home(self, id: SaveId, target: str) -> Path:
        """The directory in which a checkpoint's manifest belongs that has this ``target``."""
        return self.root / (target[:-1] if target.endswith("/") else f"checkpoint-{id.step}")

    def draft(self, kind: str) -> Path:
        """A new private path.

        ``tmp`` is being written; ``retired`` made way for another and counts still; ``dropped`` counts no more;
        ``deleted`` counts no more, nor shall the file that its user named remain; ``quarantine-...`` was found bad.
        """
        return self.private / f"{kind}-{secrets.token_hex(6)}"

    def drafts(self, kind: str) -> list[Path]:
        """All private paths of that kind."""
        return [path for path in _entries(self.private) if path.name.startswith(f"{kind}-")]

    def parts(self) -> list[tuple[SaveId, Path]]:
        """The directories in which nodes gather what each has of a checkpoint, and of which one."""
        return _parts(self.drafts("parts"))

    def taken_apart(self) -> list[Path]:
        """Private paths that may have the manifest of a place that could not be renamed."""
        return self.drafts("dropped") + self.drafts("deleted")

    def remains(self, record: Path) -> Path | None:
        """The place whose manifest was moved to a private path, if there are remains of it: they do not count."""
        try:
            name = (record / REMAINS).read_text("utf-8", "surrogateescape")
        except (OSError, ValueError):
            return None
        place = self.root / name
        is_place = place.parent in (self.root, self.private) and place not in (self.root, self.private)
        is_there = is_place and place.is_dir() and not place.is_symlink()
        is_apart = os.path.lexists(record / NAME) and not os.path.lexists(place / NAME)
        return place if is_there and is_apart else None

    def contents(self) -> Contents:
        """What is there, by one listing of the directory and then one of its private part."""
        root, private = _directories(self.root), _directories(self.private)
        others = with_manifests([place for place in root if not _PLACE.fullmatch(place.name)])
        named = {place for place in others if self._is_home(place)}
        here = [place for place in root if _PLACE.fullmatch(place.name) or place in named]
        kinds = defaultdict[str, list[Path]](list)
        for path in private:
            kinds["".join(path.name.partition("-")[:2])].append(path)
        records = [place for place in kinds["checkpoint-"] if self.is_record(place)]
        places = [*here, *records, *kinds["retired-"]]
        return Contents(places, kinds["quarantine-"], _parts(kinds["parts-"]), root | private)

    def is_record(self, place: Path) -> bool:
        """Whether an earlier version kept a checkpoint there whose model it wrote to the user's path alone."""
        return place.parent == self.private and bool(_RECORD.fullmatch(place.name))

    def _is_home(self, place: Path) -> bool:
        """Whether a manifest belongs there, or is damaged; a checkpoint that users copied or renamed is theirs."""
        try:
            manifest = read_manifest(place)
        except BadCheckpoint:
            return True
        return manifest is not None and self.home(manifest.id, manifest.target) == place

    def looks_like_ours(self, place: Path) -> bool:
        """Whether files of a checkpoint of ours lie there, be it that its manifest was lost or not copied along."""
        if place.parent != self.root:
            return False
        metadata = place / METADATA  # unlike that of torch's own writers, ours has whole pages
        return (place / MODEL).is_file() or (metadata.is_file() and metadata.stat().st_size % PAGE == 0)

    def file_of(self, manifest: Manifest) -> Path | None:
        """The file that the user named for `MODEL`, if they did."""
        return self.root / manifest.target if manifest.target and not manifest.target.endswith("/") else None

    def name_within(self, id: SaveId, target: str) -> str:
        """The name in the checkpoint's own directory of the file that the user named; empty if it is not there."""
        home = self.home(id, target).name
        return target.removeprefix(f"{home}/") if target.startswith(f"{home}/") else ""

    def own(self, target: str, id: SaveId) -> str:
        """A user's path as a manifest's ``target``: empty if it is the default one.

        Links are followed, as torch.save would follow them. Raises ConfigError for a path that would tear
        another checkpoint.
        """
        if not target:
            return ""
        if target.endswith("/"):
            return self._own_directory(target, id)
        path, root = Path(os.path.realpath(target)), Path(os.path.realpath(self.root))
        home = root / f"checkpoint-{id.step}"
        if path == home / MODEL:
            return ""
        if path == home:
            raise ConfigError(f"cannot save to {path}: the checkpoint's own directory has that name. Try {path}.pt.")
        others = [place for place in path.parents if place != home and self._is_checkpoint(place)]
        if path.is_relative_to(root / PRIVATE) or path == root / TRACKER or others:
            raise ConfigError(f"cannot save to {path}: it is part of another checkpoint. Choose another path.")
        return str(path.relative_to(root) if path.is_relative_to(root) else path)

    def _own_directory(self, target: str, id: SaveId) -> str:
        root = Path(os.path.realpath(self.root))
        path = Path(os.path.realpath(Path(target).parent), Path(target).name)  # a link of that name makes way
        if path == root / f"checkpoint-{id.step}":
            return ""
        if path.parent != root or path.name.startswith(".") or _PLACE.fullmatch(path.name) or path == root / TRACKER:
            raise ConfigError(
                f"cannot save to the directory {path}: the directory of step {id.step} must lie in {root} itself, and "
                f"be called checkpoint-{id.step}, or in a way that begins with no dot and is no other step's."
            )
        return f"{path.name}/"

    def _is_checkpoint(self, place: Path) -> bool:
        try:
            return read_manifest(place) is not None
        except BadCheckpoint:
            return bool(_PLACE.fullmatch(place.name))

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Tell sweeps of any process on any node to keep off; raises PersistError if one takes too long.

        Where the file system has no locks, writers go on, and sweeps never find themselves alone.
        """
        make_directories(self.root)
        make_directories(self.private)
        with self._lock() as lock:
            deadline = time.monotonic() + SWEEP_DEADLINE
            while not _locked(lock, fcntl.LOCK_SH, otherwise=True):
                if time.monotonic() > deadline:
                    raise PersistError(
                        f"{self.private} is being swept by another process for over {SWEEP_DEADLINE:.0f} s. "
                        f"See who has {self.private}/writers locked (lslocks), then save again."
                    )
                time.sleep(0.01)
            yield

    @contextlib.contextmanager
    def publishing(self, *, first: bool) -> Iterator[bool]:
        """Whether this node alone may publish what several have gathered, until this ends.

        Where the file system has no locks, only the ``first`` one may.
        """
        with self._lock("publisher") as lock:
            yield _locked(lock, fcntl.LOCK_EX, otherwise=first)

    def changes(self) -> list[int]:
        """When names were last made, removed or changed in the directories that hold checkpoints, in nanoseconds."""
        return [path.stat().st_mtime_ns for path in (self.root, self.private) if path.is_dir()]

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool]:
        """Whether nobody writes, nor begins to until this ends."""
        if not self.private.is_dir():
            yield False
            return
        with self._lock() as lock:
            yield _locked(lock, fcntl.LOCK_EX, otherwise=False)

    def has_locks(self) -> bool:
        """Whether the file system has locks, by which writers and sweeps know of each other."""
        if not self.private.is_dir():
            return True
        with self._lock() as lock:
            return _locked(lock, fcntl.LOCK_UN, otherwise=False)  # which waits for nobody

    def idle(self, place: Path) -> float:
        """Seconds since anything changed in a place, by the clock of the file system."""
        clock = self.private / "writers"
        os.utime(clock)
        latest = max(path.lstat().st_mtime for path in [place, *place.rglob("*")])
        return clock.stat().st_mtime - latest

    @contextlib.contextmanager
    def _lock(self, name: str = "writers") -> Iterator[int]:
        lock = open_file(self.private / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            yield lock
        finally:
            os.close(lock)


def _parts(drafts: Iterable[Path]) -> list[tuple[SaveId, Path]]:
    matches = [(_PARTS.fullmatch(place.name), place) for place in drafts]
    return [(SaveId(int(match[1]), int(match[2])), place) for match, place in matches if match]


def _entries(directory: Path) -> list[Path]:
    """What is in a directory, if there is one. An unreadable one raises: it must not look like an empty one."""
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:
        return []


def _directories(directory: Path) -> dict[Path, int]:
    """The directories in one, by name, with their inodes; also links to such. Errors are those of `_entries`."""
    found = list[tuple[str, int]]()
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                # The listing tells the kinds of entries: of 100,000 files beside checkpoints none is opened.
                try:
                    is_directory = entry.is_dir()
                except OSError:  # of a link, or where the listing tells no kinds: what opens it will find out
                    is_directory = True
                if is_directory:
                    found.append((entry.name, entry.inode()))
    except FileNotFoundError:
        return {}
    return {directory / name: inode for name, inode in sorted(found)}


def _locked(lock: int, mode: int, *, otherwise: bool) -> bool:
    """Whether this lock could be had now; ``otherwise``, if the file system has no locks."""
    try:
        fcntl.flock(lock, mode | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _WITHOUT_LOCKS:
            return otherwise
        if error.errno != errno.EWOULDBLOCK:
            raise
        return False
    return True
