"""Gathers what several nodes have of one checkpoint; whoever finds all of it there publishes it."""

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fastckpt import metrics
from fastckpt.errors import BadCheckpoint
from fastckpt.format.ids import SaveId
from fastckpt.format.manifest import MODEL, NAME, FileEntry, Manifest
from fastckpt.storage.claims import DRAFT
from fastckpt.storage.commit import Commit, ours
from fastckpt.storage.copier import Copier
from fastckpt.storage.durable import explained, remove, sync_directory, sync_tree, write_text
from fastckpt.storage.layout import FILES, Layout
from fastckpt.storage.publish import Request, announce, draft_for, write_images
from fastckpt.storage.removal import drop
from fastckpt.storage.scan import Scan
from fastckpt.storage.stored import check_size, read_manifest

ABANDONED = 3600.0
"""Seconds without a change after which a sweep takes what was gathered for abandoned."""
_SHARE = "share"
"""The detail in which the manifest of a part tells which one it is."""


@dataclass(frozen=True)
class Share:
    """Which part of a checkpoint a node has.

    Attributes:
        node: Its number, from 0 on; the first one has the model.
        nodes: How many there are.
        attempt: Tells a run of the job from others that happen to give their histories the same number.
        target: The file that the user named, as a manifest has it.
    """

    node: int
    nodes: int
    attempt: str = ""
    target: str = ""

    @property
    def key(self) -> str:
        """The same for all parts that belong together, and for no others of the same id."""
        text = json.dumps([self.nodes, self.attempt, self.target])
        return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()


class Parts:
    """The parts of one checkpoint, in ``.fastckpt/parts-<history>-<step>-<key>``.

    There are ``files``, with the images of all nodes, and for each node that has written its own, durably, a
    ``part-<node>.json``: a manifest of these alone. Everything can be done again, and by any node.
    """

    def __init__(self, layout: Layout, id: SaveId, share: Share) -> None:
        self.id = id
        self._layout = layout
        self._share = share
        self._place = layout.private / f"parts-{id.history}-{id.step}-{share.key}"
        self._files = self._place / FILES
        self._draft = draft_for(layout, share.target, f"{id.history}-{id.step}-{share.key}")

    def contribute(self, request: Request, copier: Copier) -> None:
        """Write this node's part, unless it is there; on failure nothing is left of it, and the others' parts stay."""
        if self._at_home() or self._part(self._share.node):
            return
        self._files.mkdir(0o700, parents=True, exist_ok=True)
        self._withdraw(request)  # what one who died left of it
        draft = self._draft if MODEL in request.images else None
        with ExitStack() as on_failure:
            on_failure.callback(self._withdraw, request)
            if draft:
                announce(self._layout, self._files, draft)
            part = request.manifest(write_images(request, self._files, draft, copier))
            with metrics.phase("persist.part", step=self.id.step, node=self._share.node):
                marked = replace(part, details={**part.details, _SHARE: asdict(self._share)})
                self._put(marked, self._place / _name(self._share.node))
            on_failure.pop_all()

    def missing(self) -> list[int]:
        """The nodes whose parts are not there."""
        return [node for node in range(self._share.nodes) if not self._part(node)]

    def publish(self) -> Manifest | None:
        """Make it one checkpoint if all parts are there; its manifest once it is one, whoever published it.

        Raises:
            OSError: Storage refused. The parts stay, and older checkpoints are as they were.
            BadCheckpoint: The parts do not go together.
        """
        with self._layout.publishing(first=self._share.node == 0) as mine:
            manifest = self._at_home()
            if mine and (manifest is None or self._is_drafted):
                manifest = self._publish(manifest or self._assemble())
            if mine and manifest and self._place.exists():
                drop(self._layout, self._place)
            return None if self._is_drafted else manifest

    @property
    def _is_drafted(self) -> bool:
        return self._draft is not None and self._draft.exists()

    def _publish(self, manifest: Manifest | None) -> Manifest | None:
        if manifest is None:
            return None
        commit = Commit(self._layout, self.id, self._share.target, self._files, self._draft)
        with ExitStack() as on_failure:
            on_failure.callback(commit.bring_back)
            commit.run()
            on_failure.pop_all()
        commit.finish()
        return manifest

    def _assemble(self) -> Manifest | None:
        """Write the manifest of all parts, if they are there."""
        parts = [part for part in map(self._part, range(self._share.nodes)) if part]
        if len(parts) < self._share.nodes:
            return None
        if len({(part.world_size, part.parent) for part in parts}) > 1:
            raise BadCheckpoint(f"the parts in {self._place} are of jobs with different numbers of ranks, or parents")
        with metrics.phase("persist.manifest", step=self.id.step):
            manifest = replace(
                parts[0],
                files=tuple(entry for part in parts for entry in part.files),
                time=time.time(),
                details={name: value for name, value in parts[0].details.items() if name != _SHARE},
                target=self._share.target,
            )
            self._put(manifest, self._files / NAME)
            sync_tree(self._files)
        return manifest

    def _at_home(self) -> Manifest | None:
        """The manifest in the place where this checkpoint belongs, if it is of this one."""
        target = self._share.target
        manifest = ours(self._layout.record(self.id) if target else self._layout.default(self.id.step))
        same = manifest and manifest.id == self.id and manifest.target == target
        return manifest if same and manifest and manifest.details.get("attempt", "") == self._share.attempt else None

    def _part(self, node: int) -> Manifest | None:
        """What a node has written, if it is there, and its files as it left them."""
        try:
            part = read_manifest(self._place, _name(node))
            if part is None or part.id != self.id or _share(part) != replace(self._share, node=node):
                return None
            for entry in part.files:
                check_size(entry, self._path(entry))
        except BadCheckpoint:
            return None
        return part

    def _path(self, entry: FileEntry) -> Path:
        return self._draft if self._draft and entry.name == MODEL else self._files / entry.name

    def _put(self, manifest: Manifest, path: Path) -> None:
        draft = self._layout.draft("tmp")
        try:
            write_text(draft, manifest.to_json())
            draft.rename(path)
        except OSError:
            remove(draft)
            raise

    def _withdraw(self, request: Request) -> None:
        """Remove this node's part, its record first."""
        remove(self._place / _name(self._share.node))
        for name in request.images:
            remove(self._files / name)
        if self._draft and self._is_drafted and MODEL in request.images:
            remove(self._draft)
            sync_directory(self._draft.parent)
        if MODEL in request.images and not self._is_drafted:
            remove(self._files / DRAFT)


class Contribution:
    """A node's part of a checkpoint, which is there; the others' may not be there yet."""

    def __init__(self, layout: Layout, parts: Parts) -> None:
        self.id = parts.id
        self._layout = layout
        self._parts = parts

    def complete(self) -> Manifest | None:
        """Publish the checkpoint if all parts are there; its manifest once that is done, by whichever node.

        Raises PersistError if storage refuses, BadCheckpoint if the parts do not go together.
        """
        with explained(f"publish {self.id}", self._layout.root), self._layout.writing():
            return self._parts.publish()

    def missing(self) -> list[int]:
        """The nodes that have not written their part."""
        return self._parts.missing()


def sweep(layout: Layout, scan: Scan) -> Iterator[Path]:
    """Publish what is complete, remove what is older than a checkpoint that counts, and what is long untouched.

    Call while nobody writes. Where locks do not reach other nodes, one of them may write nevertheless; so what else
    there is stays until a publication makes it useless.
    """
    newest = max((stored.id for stored in scan.places), default=None)
    for id, place in layout.parts():
        if newest is None or id > newest:
            shares = [share for path in place.glob("part-*.json") if (share := _share(_read(path)))]
            if any(Parts(layout, id, share).publish() for share in shares if place.name.endswith(share.key)):
                yield place
                continue
        if (newest is not None and id <= newest) or _idle(layout, place) > ABANDONED:
            drop(layout, place)
            yield place


def _name(node: int) -> str:
    return f"part-{node}.json"


def _read(path: Path) -> Manifest | None:
    try:
        return read_manifest(path.parent, path.name)
    except BadCheckpoint:
        return None


def _share(part: Manifest | None) -> Share | None:
    match part.details.get(_SHARE) if part else None:
        case {"node": int(node), "nodes": int(nodes), "attempt": str(attempt), "target": str(target)}:
            return Share(node, nodes, attempt, target)
    return None


def _idle(layout: Layout, place: Path) -> float:
    """Seconds since anything changed there, by the clock of the file system."""
    clock = layout.private / "writers"
    os.utime(clock)
    latest = max(path.lstat().st_mtime for path in [place, *place.rglob("*")])
    return clock.stat().st_mtime - latest
