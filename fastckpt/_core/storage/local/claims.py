"""To which checkpoint a file that users named belongs, when they name the same one again and again."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from fastckpt._core.format.manifest import MODEL, Stamp
from fastckpt._core.storage.local.stored import Stored, check_digest, check_size, digest
from fastckpt.errors import BadCheckpoint

DRAFT = "draft"
"""Name of a text in a record: the path at which the user's file is written until its rename commits."""
DRAFT_PREFIX = ".fastckpt-"


@dataclass(frozen=True)
class Verdict:
    """What became of the claims on users' files.

    Attributes:
        owners: One checkpoint for each file that is whole.
        stale: Those that were never committed, or whose file a newer one took over.
        damaged: Files that are not what their newest checkpoint saved, and why.
    """

    owners: list[Stored] = field(default_factory=list)
    stale: list[Stored] = field(default_factory=list)
    damaged: list[tuple[Path, str]] = field(default_factory=list)


class Claims:
    """Settles claims; keeps the digests of files that had to be read for that."""

    def __init__(self) -> None:
        self._digests: dict[tuple[Path, Stamp, int], str] = {}

    def settle(self, claims: Iterable[Stored]) -> Verdict:
        """Give each file to the checkpoint whose stamp it bears, else to the newest of its size and digest."""
        verdict = Verdict()
        rivals: defaultdict[Path, list[Stored]] = defaultdict(list)
        for stored in sorted(claims, key=lambda stored: stored.id, reverse=True):
            if _committed(stored):
                rivals[stored.path].append(stored)
            else:
                verdict.stale.append(stored)
        for newest_first in rivals.values():
            self._settle_one(newest_first, verdict)
        return verdict

    def _settle_one(self, newest_first: list[Stored], verdict: Verdict) -> None:
        stamped_first = sorted(newest_first, key=lambda stored: not _bears_stamp(stored))
        owner = next((stored for stored in stamped_first if self._fault(stored) is None), None)
        newest = newest_first[0]
        fault = self._fault(newest)
        lost = [newest] if fault and (owner is None or newest.id > owner.id) else []
        verdict.owners.extend([owner] if owner else [])
        verdict.damaged.extend((stored.path, f"{stored.id}: {fault}") for stored in lost)
        verdict.stale.extend(s for s in newest_first if s is not owner and s not in lost)

    def _fault(self, stored: Stored) -> str | None:
        entry, path = stored.manifest.entry(MODEL), stored.path
        try:
            found = check_size(entry, path)
            stamp = Stamp(found.st_ino, found.st_mtime_ns)
            if stamp != entry.stamp:
                key = (path, stamp, found.st_size)
                self._digests[key] = self._digests.get(key) or digest(path)
                check_digest(entry, path, self._digests[key])
        except BadCheckpoint as error:
            return str(error)
        return None


def draft_of(place: Path) -> Path | None:
    """What is left of the path at which the user's file of a record was written, None after its rename."""
    try:
        path = Path((place / DRAFT).read_text("utf-8", "surrogateescape"))
        return path if path.name.startswith(DRAFT_PREFIX) and path.is_file() else None
    except (OSError, ValueError):
        return None


def _committed(stored: Stored) -> bool:
    draft = draft_of(stored.place)
    try:
        # A crash in the middle of the rename may have left both names.
        return draft is None or draft.samefile(stored.path)
    except OSError:
        return False


def _bears_stamp(stored: Stored) -> bool:
    try:
        found = stored.path.stat()
    except OSError:
        return False
    return stored.manifest.entry(MODEL).stamp == (found.st_ino, found.st_mtime_ns)
