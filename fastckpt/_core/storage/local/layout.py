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
from fastckpt._core.format.manifest import METADATA, MODEL, NAME, Manifest, file_named
from fastckpt._core.io.directory_root import DirectoryRoot, Entry
from fastckpt._core.io.durable import make_directories
from fastckpt._core.storage.local.identity import KnownDirectory, mark
from fastckpt._core.storage.local.stored import read_manifest, with_manifests
from fastckpt.errors import BadCheckpoint, ConfigError, PersistError

PRIVATE = ".fastckpt"
PAGE = 4096
FILES = "files"
"""Directory, in one of parts, that becomes the checkpoint's."""
APART = {kind: f"{NAME}.{kind}" for kind in ("dropped", "deleted")}
"""Names of a manifest in a place that counts no more, and that could not be renamed to a private path of that kind."""
TRACKER = "latest_checkpointed_iteration.txt"
ABANDONED = 3600.0
"""Seconds without a change after which a sweep takes a draft for abandoned, where no locks show its writer."""
SWEEP_DEADLINE = 60.0
"""Seconds that a writer waits for the sweep of another process to end."""

_PLACE = re.compile("checkpoint-[0-9]{1,19}")
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Answers of file systems that have no locks, such as Lustre without the option ``flock``."""
_PARTS = re.compile("parts-([0-9]{1,19})-([0-9]{1,19})-[0-9a-f]{12}")
_RECORD = re.compile("checkpoint-[0-9]{1,19}-[0-9]{1,19}")
"""Name of a checkpoint of early versions in the private directory; its model was at its user's path alone."""


class Contents(NamedTuple):
    """Contents of a checkpoint directory, by the names there.

    Attributes:
        places: All directories that may hold a manifest of ours, present checkpoints before retired ones.
        records: Files that early versions left, which are not read.
        quarantined: Places of checkpoints that were found bad.
        parts: The directories in which nodes gather their parts of a checkpoint, and its id.
        inodes: Inodes of all directories, by path.
    """

    places: list[Path]
    records: list[Path]
    quarantined: list[Path]
    parts: list[tuple[SaveId, Path]]
    inodes: Mapping[Path, int]


class Layout:
    """The paths of one checkpoint directory, and the lock that shows whether anybody writes to it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = DirectoryRoot(root)
        """All that is done in this directory is done by this."""
        self.private = root / PRIVATE
        self.tracker = root / TRACKER
        self.known: KnownDirectory | None = None
        """The directory that is written to alone; None for whichever has its name."""

    def home(self, id: SaveId, target: str) -> Path:
        """The directory in which a checkpoint's manifest belongs that has this ``target``."""
        return self.root / (target[:-1] if target.endswith("/") else f"checkpoint-{id.step}")

    def draft(self, kind: str) -> Path:
        """A new private path.

        ``tmp`` is being written. ``retired`` made way for another and counts still. ``dropped`` counts no more.
        ``deleted`` counts no more, nor shall the file that its user named remain. ``quarantine-...`` was found bad.
        """
        return self.private / f"{kind}-{secrets.token_hex(6)}"

    def aside(self, home: Path) -> Path:
        """A new path beside that of a checkpoint, for files that have to make way and are not ours to remove."""
        return home.with_name(f"{home.name}.aside-{secrets.token_hex(6)}")

    def drafts(self, kind: str) -> list[Path]:
        """All private paths of that kind."""
        return [self.private / name for name in self.names() if name.startswith(f"{kind}-")]

    def names(self) -> list[str]:
        """Return the names in the private directory, sorted."""
        return [entry.name for entry in self._entries(self.private)]

    def _entries(self, directory: Path) -> list[Entry]:
        """Return the entries of a directory; [] if there is none.

        A directory that cannot be read raises: it must not look empty.
        """
        try:
            return self.files.entries(directory)
        except FileNotFoundError:
            return []

    def parts(self) -> list[tuple[SaveId, Path]]:
        """The directories in which nodes gather their parts of a checkpoint, and its id."""
        return _parts(self.drafts("parts"))

    def taken_apart(self) -> list[Path]:
        """Places that could not be renamed, and count no more."""
        places = (self.root / entry.name for entry in self._entries(self.root) if entry.is_directory)
        return [place for place in places if self.apart(place)]

    def apart(self, place: Path) -> str:
        """The name of the manifest in a place that was taken apart; empty if it counts, or never did."""
        if self.files.exists(place / NAME):
            return ""
        return next((name for name in APART.values() if self.files.is_file(place / name)), "")

    def contents(self) -> Contents:
        """Return the contents, by one listing of the directory and then one of its private part."""
        root = {self.root / each.name: each.inode for each in self._entries(self.root) if each.leads_to_directory}
        private = {self.private / each.name: each.inode for each in self._entries(self.private) if each.is_directory}
        others = with_manifests([place for place in root if not _PLACE.fullmatch(place.name)])
        named = {place for place in others if self._is_home(place)}
        here = [place for place in root if _PLACE.fullmatch(place.name) or place in named]
        kinds = defaultdict[str, list[Path]](list)
        for path in private:
            kinds["".join(path.name.partition("-")[:2])].append(path)
        records = [place for place in kinds["checkpoint-"] if _RECORD.fullmatch(place.name)]
        places = [*here, *kinds["retired-"]]
        return Contents(places, records, kinds["quarantine-"], _parts(kinds["parts-"]), root | private)

    def _is_home(self, place: Path) -> bool:
        """Return whether a manifest belongs there, or is damaged; a checkpoint that users moved or copied is theirs."""
        try:
            manifest = read_manifest(place)
        except BadCheckpoint:
            return True
        return manifest is not None and self.home(manifest.id, manifest.target) == place

    def looks_like_ours(self, place: Path) -> bool:
        """Return whether a place has files of a checkpoint of ours, even if its manifest was lost or not copied."""
        if place.parent != self.root:
            return False
        metadata = place / METADATA  # unlike that of torch's own writers, ours has whole pages
        is_ours = (place / MODEL).is_file() or (metadata.is_file() and metadata.stat().st_size % PAGE == 0)
        return is_ours and not (self.files.is_directory(place) and self.apart(place))

    def file_of(self, manifest: Manifest) -> Path | None:
        """The file that the user named for `MODEL`, if they did: to be shown, or removed if it is in this directory."""
        return self.root / manifest.target if file_named(manifest.target) else None

    def name_within(self, id: SaveId, target: str) -> str:
        """The name in the checkpoint's own directory of the file that the user named; empty if it is not there."""
        home = self.home(id, target).name
        return target.removeprefix(f"{home}/") if target.startswith(f"{home}/") else ""

    def own(self, target: str, id: SaveId) -> str:
        """A user's path as a manifest's ``target``: empty if it is the default one.

        Links are followed, as torch.save would follow them, but not those in this directory: others may have put them
        there. Raises ConfigError for a path that would tear another checkpoint.
        """
        if not target:
            return ""
        if target.endswith("/"):
            return self._own_directory(target, id)
        path, root = self._without_links(Path(target)), Path(os.path.realpath(self.root))
        home = root / f"checkpoint-{id.step}"
        if path == home / MODEL:
            return ""
        if path.is_dir() and path != home:
            raise ConfigError(f"cannot save to {path}: it is a directory. Give the path of a file, or remove it.")
        if path == home:
            raise ConfigError(f"cannot save to {path}: the checkpoint's own directory has that name. Try {path}.pt.")
        others = [place for place in path.parents if place != home and self._is_checkpoint(place, root)]
        if path.is_relative_to(root / PRIVATE) or path in (root / TRACKER, home / NAME) or others:
            raise ConfigError(
                f"cannot save to {path}: it is part of a checkpoint, and not its model. Choose another path."
            )
        return str(path.relative_to(root) if path.is_relative_to(root) else path)

    def _without_links(self, target: Path) -> Path:
        """A path with all links above this directory followed, and none within it."""
        for directory in target.parents:
            if os.path.realpath(directory) == os.path.realpath(self.root):
                return Path(os.path.realpath(self.root)) / target.relative_to(directory)
        return Path(os.path.realpath(target))

    def _own_directory(self, target: str, id: SaveId) -> str:
        root = Path(os.path.realpath(self.root))
        path = Path(os.path.realpath(Path(target).parent), Path(target).name)  # a link of that name makes way
        if path == root / f"checkpoint-{id.step}":
            return ""
        if path.parent != root or path.name.startswith(".") or _PLACE.fullmatch(path.name) or path == root / TRACKER:
            raise ConfigError(
                f"cannot save to the directory {path}: the directory of step {id.step} must be in {root} itself, and "
                f"be called checkpoint-{id.step}, or in a way that begins with no dot and is no other step's."
            )
        return f"{path.name}/"

    def _is_checkpoint(self, place: Path, root: Path) -> bool:
        if place.parent == root and _PLACE.fullmatch(place.name):
            return True  # or will be: of a step that is still to be published
        try:
            return read_manifest(place) is not None
        except BadCheckpoint:
            return bool(_PLACE.fullmatch(place.name))

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Keep sweeps of any process on any node off; raises PersistError if one takes too long.

        Raises it also if the directory is not the one that is known. Where the file system has no locks, writers go
        on, and sweeps never find themselves alone.
        """
        is_removed = self.known is not None and self.known.is_removed(self.root)
        make_directories(self.root)
        self.files.make_directory(self.private, durable=True)
        if self.known is not None and is_removed:
            mark(self.root, self.known.mark)  # by which other nodes see that it is this job's
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
        """Enter a block in which, if True is given, only this node may publish the parts that several have gathered.

        Where the file system has no locks, only the ``first`` one may.
        """
        with self._lock("publisher") as lock:
            yield _locked(lock, fcntl.LOCK_EX, otherwise=first)

    def changes(self) -> list[int]:
        """Return the times of the last changes of names in the directories that hold checkpoints, in nanoseconds."""
        found = map(self.files.lstat, (self.root, self.private))
        return [each.st_mtime_ns for each in found if each]

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool]:
        """Enter a block in which, if True is given, nobody writes or begins to."""
        if not self.files.is_directory(self.private):
            yield False
            return
        with self._lock() as lock:
            yield _locked(lock, fcntl.LOCK_EX, otherwise=False)

    def has_locks(self) -> bool:
        """Return whether the file system has locks, by which writers and sweeps know of each other."""
        if not self.files.is_directory(self.private):
            return True
        with self._lock() as lock:
            return _locked(lock, fcntl.LOCK_UN, otherwise=False)  # which waits for nobody

    def idle(self, place: Path) -> float:
        """Seconds since anything changed in a place, by the clock of the file system."""
        with self._lock() as clock:
            os.utime(clock)
            return os.fstat(clock).st_mtime - self.files.latest_change(place)

    @contextlib.contextmanager
    def _lock(self, name: str = "writers") -> Iterator[int]:
        lock = self.files.open(self.private / name, os.O_RDWR | os.O_CREAT)
        try:
            yield lock
        finally:
            os.close(lock)


def _parts(drafts: Iterable[Path]) -> list[tuple[SaveId, Path]]:
    matches = [(_PARTS.fullmatch(place.name), place) for place in drafts]
    return [(SaveId(int(match[1]), int(match[2])), place) for match, place in matches if match]


def _locked(lock: int, mode: int, *, otherwise: bool) -> bool:
    """Try to get this lock and return whether it succeeded; ``otherwise``, if the file system has no locks."""
    try:
        fcntl.flock(lock, mode | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _WITHOUT_LOCKS:
            return otherwise
        if error.errno != errno.EWOULDBLOCK:
            raise
        return False
    return True
