"""The reader's rule for objects: finds the checkpoints at a URL that count."""

import hashlib
import re
import secrets
import socket
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fastckpt._core.format.completeness import missing_of
from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import MAX_TEXT, NAME, Manifest
from fastckpt._core.policy.lineage import passed_over
from fastckpt._core.storage.local.quarantine import WHY
from fastckpt._core.storage.remote.objects import Objects
from fastckpt.errors import BadCheckpoint, NewerFormat

LONGEST_REASON = 4096
"""Bytes of a ``why.txt`` that are read."""
LOOKS = 3
"""Number of looks at a place that seems damaged: a listing of many objects is no snapshot."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_STEP = re.compile("checkpoint-([0-9]{1,19})")
_SHARED = "00000000"
"""Stands for the host in a place of several."""
_PLACE = re.compile("checkpoint-([0-9]{1,19})/([0-9]{1,19})-([0-9a-f]{8})-[0-9a-f]{12}")


@dataclass(frozen=True)
class RemoteCheckpoint:
    """A checkpoint in a store, as its manifest describes it.

    Attributes:
        manifest: Manifest of its files.
        name: The name in the store below which its objects lie.
        place: The URL of the same.
        target: The URL of the copy of its model that the user named, if any.
    """

    manifest: Manifest
    name: str
    place: str
    target: str | None

    @property
    def id(self) -> SaveId:
        """Id of the save."""
        return self.manifest.id

    @property
    def path(self) -> str:
        """Path that users know: the copy that they named, else the URL."""
        return self.target or self.place

    def object(self, name: str) -> str:
        """The name of the object of a file; raises BadCheckpoint if the manifest does not name it."""
        return f"{self.name}/{self.manifest.entry(name).name}"


@dataclass(frozen=True)
class RemoteScan:
    """Contents of a store after a scan.

    Attributes:
        places: Every checkpoint with all files of its manifest, newest id first; of one id, the one published last
            comes first.
        damaged: URLs of places that are no whole checkpoints although they have a manifest, and why.
        quarantined: URLs of quarantined places, and why.
        unfinished: Names of places without a manifest, with the name of one of their objects.
    """

    places: list[RemoteCheckpoint] = field(default_factory=list)
    damaged: list[tuple[str, str]] = field(default_factory=list)
    quarantined: list[tuple[str, str]] = field(default_factory=list)
    unfinished: list[tuple[str, str]] = field(default_factory=list)

    @property
    def whole(self) -> list[RemoteCheckpoint]:
        """Whole checkpoints, as `Scan.whole`."""
        return [stored for stored in self.distinct if not missing_of(stored.manifest)]

    @property
    def distinct(self) -> list[RemoteCheckpoint]:
        """Distinct checkpoints, as `Scan.distinct`."""
        return list({stored.id: stored for stored in reversed(self.places)}.values())[::-1]

    @property
    def gathered(self) -> list[SaveId]:
        """Checkpoints of which some nodes have made their part, but not all."""
        return [id for place, _ in self.unfinished if is_shared(place) and (id := id_of(place))]

    def replaced(self, manifest: Manifest, name: str) -> list[str]:
        """The names of the places of a step that count no more beside the checkpoint of that name."""
        return [
            old.name
            for old in self.places
            if old.name != name
            and old.id not in passed_over(manifest.details)
            and (old.id < manifest.id or (old.id, old.manifest.target) == (manifest.id, manifest.target))
        ]


class Catalog:
    """Finds the checkpoints of a store. It remembers manifests that it has read: none is ever written twice."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._manifests: dict[str, Manifest] = {}

    def scan(self) -> RemoteScan:
        """Read all manifests, and list all objects; raises FileNotFoundError if there is no such bucket."""
        folders = [folder for folder in self._objects.folders() if _STEP.fullmatch(folder)]
        # Listings of an empty bucket and of one that does not exist look alike, and only one of both is a fresh start.
        if not folders and not self._objects.bucket_is_there():
            raise FileNotFoundError(f"{self._objects.url()}: no such bucket, or it cannot be reached")
        listed = self._list(folders)
        # A copy, because threads of `_read_manifests` may add to the dict meanwhile.
        self._manifests = {place: manifest for place, manifest in self._manifests.copy().items() if place in listed}
        return self._judge(listed)

    def of_step(self, step: int) -> RemoteScan:
        """Return the places of one step."""
        return self._judge(self._list([f"checkpoint-{step}"]))

    def forget(self, place: str) -> None:
        """This place is gone."""
        self._manifests.pop(place, None)

    def manifest(self, place: str) -> Manifest:
        """The manifest of a place; raises BadCheckpoint if there is none, or it is damaged."""
        return self._manifests.get(place) or self._read(place, MAX_TEXT)

    def _list(self, folders: list[str]) -> dict[str, dict[str, int]]:
        """The objects of each place: their names, and their sizes in bytes."""
        places: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for folder, sizes in zip(folders, self._objects.each(self._objects.sizes, folders), strict=True):
            for name, size in sizes.items():
                attempt, _, inner = name.partition("/")
                places[f"{folder}/{attempt}"][inner] = size
        return {place: sizes for place, sizes in places.items() if _PLACE.fullmatch(place)}

    def _judge(self, listed: Mapping[str, Mapping[str, int]]) -> RemoteScan:
        result = RemoteScan()
        # First all at once, because a request takes tens of milliseconds; judging needs no more requests then.
        self._read_manifests(
            {place: sizes[NAME] for place, sizes in listed.items() if NAME in sizes and WHY not in sizes}
        )
        for place, sizes in listed.items():
            if WHY in sizes:
                result.quarantined.append((self._objects.url(place), self._why(place, sizes[WHY])))
            elif NAME not in sizes:
                result.unfinished.append((place, f"{place}/{min(sizes)}"))
            else:
                self._judge_one(place, sizes, result)
        result.places.sort(key=lambda stored: (stored.id, stored.manifest.time), reverse=True)
        return result

    def _judge_one(self, place: str, sizes: Mapping[str, int], result: RemoteScan) -> None:
        fault = ""
        # A deletion under way removes the manifest first: look again before this is called damage.
        for _ in range(LOOKS):
            try:
                result.places.append(self._whole(place, sizes))
                return
            except BadCheckpoint as error:
                fault = str(error)
            sizes = self._objects.sizes(place)
            if NAME not in sizes:
                return  # it was deleted just now
        result.damaged.append((self._objects.url(place), fault))

    def _whole(self, place: str, sizes: Mapping[str, int]) -> RemoteCheckpoint:
        """The checkpoint of these objects; raises BadCheckpoint if they are none."""
        manifest = self._manifests.get(place) or self._read(place, sizes[NAME])
        for entry in manifest.files:
            found = sizes.get(entry.name)
            if found != entry.size:
                what = "is not there" if found is None else f"has {found} bytes"
                raise BadCheckpoint(f"{self._objects.url(place)}/{entry.name} {what}; {entry.size} were saved")
        target = self._objects.url(manifest.target) if manifest.target else None
        return RemoteCheckpoint(manifest, place, self._objects.url(place), target)

    def _read_manifests(self, sizes: Mapping[str, int]) -> None:
        """Read new manifests, several at a time; those that cannot be read are left to `_whole`."""

        def read(place: str) -> None:
            try:
                # `_judge_one` reports bad ones: it first looks whether they were deleted meanwhile.
                self._read(place, sizes[place])
            except BadCheckpoint:
                pass

        list(self._objects.each(read, [place for place in sizes if place not in self._manifests]))

    def _read(self, place: str, size: int) -> Manifest:
        url = f"{self._objects.url(place)}/{NAME}"
        # One byte more than is allowed, so that a manifest that is too long is refused, not cut.
        text = self._objects.read(f"{place}/{NAME}", min(size, MAX_TEXT + 1))
        if text is None:
            raise BadCheckpoint(f"{url} is not there")
        try:
            manifest = Manifest.from_json(text)
        except (BadCheckpoint, NewerFormat) as error:
            raise type(error)(f"{url}: {error}") from error
        # A copy of another checkpoint's objects must not count as this one.
        if id_of(place) != manifest.id:
            raise BadCheckpoint(f"{url} is that of {manifest.id}, which belongs elsewhere")
        self._manifests[place] = manifest
        return manifest

    def _why(self, place: str, size: int) -> str:
        text = (self._objects.read(f"{place}/{WHY}", min(size, LONGEST_REASON)) or b"").decode(errors="replace")
        lines = [line.removeprefix("why: ") for line in text.splitlines() if line.startswith("why: ")]
        return lines[0] if lines else "no reason was recorded"


def new_place(id: SaveId) -> str:
    """A name under which nothing was ever written, for the objects of one attempt to publish a checkpoint."""
    return f"checkpoint-{id.step}/{id.history}-{_host()}-{secrets.token_hex(6)}"


def shared_place(id: SaveId, key: str) -> str:
    """The name of the place in which several nodes gather one checkpoint; the key is 12 hexadecimal digits."""
    return f"checkpoint-{id.step}/{id.history}-{_SHARED}-{key}"


def is_shared(place: str) -> bool:
    """Return whether several nodes write to a place."""
    match = _PLACE.match(place)
    return match is not None and match[3] == _SHARED


def is_place(name: str) -> bool:
    """Return whether this could be the name of a place, or of something below one."""
    return bool(_PLACE.match(name))


def is_ours(name: str) -> bool:
    """Return whether a place, or an object below it, was begun on this host."""
    match = _PLACE.match(name)
    return match is not None and match[3] == _host()


def id_of(place: str) -> SaveId | None:
    """The id that belongs in a place."""
    match = _PLACE.fullmatch(place)
    return SaveId(int(match[2]), int(match[1])) if match else None


def _host() -> str:
    """Name that distinguishes this host, since it was booted, from others."""
    boot = _BOOT_ID.read_text() if _BOOT_ID.exists() else ""
    # With the boot id: after a reboot no process of this host can still be writing to the old places.
    return hashlib.sha256(f"{socket.gethostname()}\0{boot}".encode()).hexdigest()[:8]
