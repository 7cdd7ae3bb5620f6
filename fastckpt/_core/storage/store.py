"""The protocol of a durable place for checkpoints, and the store that a location means."""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import Manifest
from fastckpt._core.io.copier import Copier
from fastckpt._core.storage.history import Histories
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt._core.storage.local.identity import DirectoryIdentity
from fastckpt._core.storage.local.layout import Layout
from fastckpt._core.storage.share import Share, Unfinished
from fastckpt.errors import ConfigError

_SCHEME = re.compile("([a-z0-9][a-z0-9+.-]*)://(.*)", re.IGNORECASE | re.DOTALL)
_LOCAL = ("file", "local")


class StoredCheckpoint(Protocol):
    """A whole checkpoint in a store."""

    @property
    def manifest(self) -> Manifest:
        """Manifest of the files."""

    @property
    def id(self) -> SaveId:
        """Id of the save."""

    @property
    def place(self) -> Path | str:
        """The directory or URL below which its manifest is."""

    @property
    def path(self) -> Path | str:
        """Path or URL that users know."""


Kept = TypeVar("Kept", bound=StoredCheckpoint)
Kept_co = TypeVar("Kept_co", bound=StoredCheckpoint, covariant=True)
Place = TypeVar("Place", Path, str)
Place_co = TypeVar("Place_co", Path, str, covariant=True)


class ScanResult(Protocol[Kept_co, Place_co]):
    """Contents of a store, in one reading."""

    @property
    def places(self) -> Sequence[Kept_co]:
        """Every `StoredCheckpoint` with all files of its manifest, newest id first; an id may occur twice."""

    @property
    def whole(self) -> Sequence[Kept_co]:
        """Each `StoredCheckpoint` that counts, once, newest id first: as many ranks as saved it could resume it."""

    @property
    def distinct(self) -> Sequence[Kept_co]:
        """Each checkpoint (`StoredCheckpoint`) in ``places`` once, newest id first."""

    @property
    def damaged(self) -> Sequence[tuple[Place_co, str]]:
        """Paths or URLs of checkpoints that are there but not whole, and why."""

    @property
    def quarantined(self) -> Sequence[tuple[Place_co, str]]:
        """Paths or URLs of checkpoints that were quarantined because they were found bad, and why."""

    @property
    def gathered(self) -> Sequence[SaveId]:
        """Checkpoints of which some nodes have made their part, but not all; or nobody has published them."""


class Pending(Protocol):
    """A node's part of a checkpoint of several nodes: it is there, but the others' may not be."""

    @property
    def id(self) -> SaveId:
        """Id of the save."""

    def complete(self) -> Manifest | None:
        """Publish the checkpoint if all parts are there; its manifest once that is done, by whichever node."""

    def missing(self) -> list[int]:
        """The nodes that have not written their part."""


class StoreOf(Protocol[Kept, Place]):
    """A durable place for the checkpoints of one job; see `CheckpointDirectory` and `RemoteStore`.

    A checkpoint (``Kept``) that one store returns is given to that store alone. All methods raise PersistError if the
    place refuses or does not answer.
    """

    @property
    def path(self) -> Place:
        """Location of the store: a path or a URL."""

    @property
    def histories(self) -> Histories:
        """Records of the launches that have opened histories there."""

    read_back: bool
    """True if `publish` reads back and compares its files before they count."""

    def publish(self, request: PublishRequest) -> Manifest:
        """Make one checkpoint of images; it is durable when this returns."""

    def contribute(self, request: PublishRequest, share: Share) -> Pending:
        """Make one node's part of a checkpoint of several nodes durable; it counts when all of them have done so."""

    def settle(self) -> Sequence[Manifest | Unfinished]:
        """Publish checkpoints that nodes have written whole but not published, if they are newer than all that count.

        Returns the new checkpoints, and those that lack parts. The first rank of a job calls it.
        """

    def scan(self) -> ScanResult[Kept, Place]:
        """All checkpoints, and damaged places, in one reading."""

    def checkpoints(self) -> Sequence[Kept]:
        """All whole checkpoints (`StoredCheckpoint`), newest id first."""

    def known(self) -> Sequence[Kept]:
        """Return the `checkpoints` as far as they are known: of a directory all but the newest, of a URL all."""

    def is_whole(self, stored: Kept) -> bool:
        """Return whether one that is known still has all its files.

        At a URL, where a look costs requests, it is assumed.
        """

    def manifest(self, place: Place) -> Manifest:
        """The manifest in a place; raises BadCheckpoint if there is none, or it is damaged."""

    def stored(self, manifest: Manifest, place: Place, target: Place | None) -> Kept:
        """The checkpoint of a manifest that was read, in that place; nothing is asked."""

    def verify(self, stored: Kept, names: Iterable[str] | None = None) -> None:
        """Read files of a checkpoint, by default all; raises BadCheckpoint if one is damaged."""

    def files(self, stored: Kept, into: Path) -> dict[str, Path]:
        """Return the paths of a checkpoint's files once they are fetched: in place, or in the directory ``into``."""

    def fetch(self, stored: Kept, names: Iterable[str], into: Path, *, digests: bool = True) -> None:
        """Have files of a checkpoint at the paths of `files`; raises BadCheckpoint if one is damaged.

        Without ``digests`` their sizes alone are compared, unless they are downloaded.
        """

    def delete(self, id: SaveId) -> None:
        """Remove a checkpoint; raises ConfigError if it is the newest whole one."""

    def quarantine(self, bad: Kept | Place, why: str) -> Place:
        """Quarantine a bad checkpoint: we never load or delete it; returns where it is now."""

    def sweep(self) -> Sequence[Place]:
        """Remove or restore files that crashed writers left; returns their places."""

    def identity(self) -> DirectoryIdentity:
        """Return the identity of this place; its mark is gone when the place is."""

    def mark(self, claim: str) -> str:
        """Mark this place with ``claim``, unless it has a mark; returns its mark, "" if none can be written."""

    def know(self, mark: str) -> None:
        """Write from now on only while this is the place that has this mark now, where another may get its name."""

    def close(self) -> None:
        """Let go of threads and connections."""


Store: TypeAlias = StoreOf[Any, Any]
"""Store of any location."""


def is_url(location: str | os.PathLike[str]) -> bool:
    """Return whether a location is a URL of a store beyond the file system, such as ``s3://bucket/run1``."""
    match = _SCHEME.fullmatch(os.fspath(location))
    return match is not None and match[1].lower() not in _LOCAL


def as_path(location: str | os.PathLike[str]) -> str:
    """The path that a location of the file system is, also if it is written as ``file://``; a URL as it is.

    "~" is the home directory, but where there is a folder of that name: earlier versions have made one.
    """
    text = os.fspath(location)
    match = _SCHEME.fullmatch(text)
    if text.startswith("~") and not os.path.lexists(text.split("/")[0]):
        return os.path.expanduser(text)  # noqa: PTH111 (leaves ~nobody as it is)
    return text if match is None or is_url(text) else "/" + match[2].lstrip("/")


def normalised(location: str | os.PathLike[str]) -> str:
    """One text for each place: the real path of a directory, the URL of a store without insignificant parts.

    Raises ConfigError for a chain of URLs (``simplecache::s3://...``): caches show old contents of a store.
    """
    text = os.fspath(location)
    match = _SCHEME.fullmatch(text)
    if "::" in text.split("/")[0]:
        raise ConfigError(f"{text} is a chain of URLs; give that of the store alone, such as s3://bucket/run1")
    if match is None or not is_url(text):
        return os.path.realpath(as_path(text))
    rest = "/".join(part for i, part in enumerate(match[2].split("/")) if part or i == 0)
    if not rest.strip("/") or any(part in (".", "..") for part in rest.split("/")):
        raise ConfigError(f"{text} names no place in a store; give a bucket and a prefix, such as s3://bucket/run1")
    return f"{match[1].lower()}://{rest}"


def target_in(location: str, path: str | os.PathLike[str], id: SaveId) -> str:
    """A path that a user named for a model's file, as `Store.publish` takes it: absolute, or below a store's URL.

    One that ends with "/" is for the directory of all files; in a store these cannot be named, so it is empty there.

    Raises ConfigError if the store cannot have this checkpoint's file there.
    """
    text = os.fspath(path)
    if not text:
        return ""
    if not is_url(location):
        if is_url(text):
            raise ConfigError(f"cannot save to {text}: the checkpoint directory is {location}. Give a path.")
        path = os.path.abspath(text)  # noqa: PTH100 (the links are followed where it is written)
        target = path + "/" * text.endswith("/")
        Layout(Path(location)).own(target, id)
        return target
    if text.endswith("/"):
        return ""
    scheme = location.split("://", maxsplit=1)[0] + "://"
    own = text if "://" in text else f"{location}/{text}"
    if text.startswith("/") or not own.lower().startswith(scheme):
        raise ConfigError(
            f"cannot save to {text}: the checkpoint directory is {location}. Give a {scheme} URL, or a path relative "
            "to that directory."
        )
    return normalised(own)


def open_store(location: str | os.PathLike[str], copier: Copier | None = None) -> Store:
    """The store at a path or URL, as `normalised` gave it; raises ConfigError if nothing can open such a URL."""
    if not is_url(location):
        return CheckpointDirectory(os.fspath(location), copier)
    from fastckpt._core.storage.remote.remote_store import RemoteStore  # imports fsspec: most jobs do without

    return RemoteStore(os.fspath(location), copier)
