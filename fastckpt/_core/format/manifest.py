"""The manifest of a persisted checkpoint: its files, their digests and its details, as JSON with a checksum."""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from fastckpt._core.format.ids import LARGEST, SaveId
from fastckpt.errors import BadCheckpoint, NewerFormat, ProtocolError

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"

SCHEMA = 1
NAME = "manifest.json"
MODEL = "model.pt"
"""The one file that a user may name: the manifest's ``target`` is its path."""
VARYING = ("fastckpt.tempo", "fastckpt.profile", "fastckpt.life")
"""Keys that the automatic frequency writes into a checkpoint, and which differ between any two runs."""
METADATA = ".metadata"
"""The file that makes a directory a checkpoint of torch.distributed.checkpoint."""
TRAINING = "training.pt"
"""The file of replicated state in such a checkpoint, if there is any besides the shards."""
COMMON = (MODEL, METADATA, TRAINING)
"""Files that each node has of its own, in memory, with equal contents."""
OF_EACH_NODE = "common"
"""The detail that names others than these."""
ROUND = "round"
"""The detail of a save that names the round of workers that made it."""
MEMBERS = "members"
"""The detail that names the launches of these workers, one on each node."""
LATEST = "tracker"
"""The detail that names a file of the checkpoint directory in which a framework looks for the newest one's name."""
OF_NODE = "node_"
"""The beginning of names of files that each of several nodes keeps in its own memory: they are not persisted."""
MAX_TEXT = 64 * 2**20
"""Bytes above which a text is refused unread: a manifest of 100,000 files has about 16 MB."""


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint.

    Attributes:
        name: Relative path in the checkpoint's directory, such as ``rank_0.pt``.
        size: Bytes.
        digest: xxh3-128 of the bytes, 32 hexadecimal digits.
    """

    name: str
    size: int
    digest: str

    def __post_init__(self) -> None:
        _demand(_is_inner(self.name) and self.name != NAME, "file name", self.name, "a relative path inside")
        _demand(_is_number(self.size), f"size of {self.name}", self.size, "a number of bytes")
        hexadecimal = isinstance(self.digest, str) and re.fullmatch("[0-9a-f]{32}", self.digest)
        _demand(bool(hexadecimal), f"digest of {self.name}", self.digest, "32 hexadecimal digits")


@dataclass(frozen=True)
class Manifest:
    """All that is known of one persisted checkpoint; making one of wrong values raises BadCheckpoint.

    Attributes:
        id: The state that was saved.
        parent: The state that this history was resumed from; None at the start of a job.
        files: Every file, by name at most once.
        world_size: Ranks of the job that saved.
        time: Seconds since the epoch at which the manifest was made.
        details: Further facts for a resume, such as ``omp_num_threads``.
        target: Path that the user chose for `MODEL`: absolute, or relative to the checkpoint directory if it
            is inside; empty if `MODEL` is stored with the other files. One that ends with "/" is the name that they
            chose for the directory of all files instead.
    """

    id: SaveId
    parent: SaveId | None
    files: tuple[FileEntry, ...]
    world_size: int
    time: float
    details: Mapping[str, JSON] = field(default_factory=dict)
    target: str = ""

    def __post_init__(self) -> None:
        names = [entry.name for entry in self.files]
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        _demand(not twice, "files", twice, "named once each")
        _demand(_is_number(self.world_size) and self.world_size > 0, "world size", self.world_size, "1 or more")
        good_time = type(self.time) in (int, float) and 0 <= self.time <= LARGEST  # which neither NaN nor infinity is
        _demand(good_time, "time", self.time, "seconds since the epoch")
        _demand(self.target == "" or is_target(self.target), "target", self.target, "a path without '..'")
        _demand(not file_named(self.target) or MODEL in names, "target", self.target, f"empty without a file {MODEL}")
        _demand(isinstance(self.details, Mapping), "details", self.details, "an object")

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(entry.size for entry in self.files)

    def entry(self, name: str) -> FileEntry:
        """The file of that name; raises BadCheckpoint if there is none."""
        for entry in self.files:
            if entry.name == name:
                return entry
        raise BadCheckpoint(f"the checkpoint of {self.id} has no file {name!r}; it has {len(self.files)} others")

    def to_json(self) -> str:
        """Text that `from_json` reads; raises BadCheckpoint if the details are not JSON."""
        body = {
            "fastckpt": SCHEMA,
            "id": self.id.to_json(),
            "parent": self.parent.to_json() if self.parent else None,
            "world_size": self.world_size,
            "time": self.time,
            "target": self.target,
            "details": dict(self.details),
            "files": [_file_to_json(entry) for entry in self.files],
        }
        return json.dumps({**body, "digest": _digest(body)}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Manifest":
        """Read a result of `to_json`.

        Raises:
            NewerFormat: A later version wrote it, as its digest confirms; all later formats keep ``digest``.
            BadCheckpoint: Anything else, with the value and the reason.
        """
        body = _parse(text)
        digest, schema = body.pop("digest", None), body.get("fastckpt")
        _demand(digest == _digest(body), "digest of the manifest", digest, "that of its text")
        if type(schema) is int and schema > SCHEMA:
            raise NewerFormat(
                f"format {schema} of a later fastckpt; this version reads format {SCHEMA}. Nothing was changed. "
                "Install that version again, or use another checkpoint directory"
            )
        _demand(schema == SCHEMA, "schema", schema, str(SCHEMA))
        try:
            return cls(
                id=SaveId.from_json(body["id"]),
                parent=None if body["parent"] is None else SaveId.from_json(body["parent"]),
                files=tuple(_file_from_json(entry) for entry in body["files"]),
                world_size=body["world_size"],
                time=body["time"],
                details=body["details"],
                target=body["target"],
            )
        except (KeyError, TypeError, ProtocolError) as error:
            raise BadCheckpoint(f"a manifest cannot be understood: {type(error).__name__}: {error}") from error


def is_plain(name: str) -> bool:
    """Return whether it is a name of something directly in a directory, and not hidden."""
    return "/" not in name and name[:1] not in ("", ".")


def file_named(target: str) -> str:
    """The file that a target names for `MODEL`; empty if it names none."""
    return "" if target.endswith("/") else target


def is_target(value: object) -> bool:
    """Return whether it is a path that a manifest may have as its ``target``."""
    if isinstance(value, str) and value.endswith("/"):
        return _is_inner(value[:-1]) and is_plain(value[:-1])
    return _is_inner(value) or (isinstance(value, str) and value.startswith("/") and _is_inner(value[1:]))


def _parse(text: str | bytes) -> dict:  # type: ignore[type-arg]  # its values are checked where they are used
    _demand(len(text) <= MAX_TEXT, "length of the manifest", len(text), f"at most {MAX_TEXT} bytes")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"a manifest is no JSON: {error}; it begins with {text[:40]!r}") from error
    _demand(isinstance(body, dict), "manifest", body, "an object")
    return dict(body)


def _digest(body: Mapping[str, object]) -> str:
    try:
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadCheckpoint(f"a manifest holds what is no JSON: {error}") from error
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _file_to_json(entry: FileEntry) -> dict[str, JSON]:
    return {"name": entry.name, "size": entry.size, "digest": entry.digest}


def _file_from_json(body: object) -> FileEntry:
    if not isinstance(body, dict):
        raise TypeError(f"a file is {str(body)[:200]!r}")
    # Early versions wrote it for a model that was at its user's path alone: no file is read at the word of another.
    _demand(
        "stamp" not in body, "stamp", body.get("stamp"), "absent; load that file with torch.load, and save it again"
    )
    return FileEntry(body["name"], body["size"], body["digest"])


def _demand(holds: bool, what: str, value: object, wanted: str) -> None:
    if not holds:
        raise BadCheckpoint(f"{what} is {str(value)[:200]!r} in a manifest; it must be {wanted}")


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def _is_path(value: object) -> bool:
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        return False
    return True


def _is_inner(value: object) -> bool:
    return _is_path(value) and all(part not in ("", ".", "..") for part in str(value).split("/"))
