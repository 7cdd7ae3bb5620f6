"""Gathers several nodes' parts of one checkpoint; a node that finds all parts there publishes it."""

import logging
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from fastckpt._core import metrics
from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import MODEL, NAME, Manifest
from fastckpt._core.io.copier import Copier
from fastckpt._core.io.durable import explained
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.local.commit import Commit
from fastckpt._core.storage.local.layout import ABANDONED, FILES, Layout
from fastckpt._core.storage.local.named_file import link_within, named_file
from fastckpt._core.storage.local.places import drop
from fastckpt._core.storage.local.publish import write_images
from fastckpt._core.storage.local.scan import CheckpointReader, Scan
from fastckpt._core.storage.local.stored import check_size, ours, read_manifest
from fastckpt._core.storage.share import Share, Unfinished, assemble, lacking, name_of, share_of
from fastckpt.errors import BadCheckpoint, FastckptError

logger = logging.getLogger("fastckpt")


class PartFiles:
    """The parts of one checkpoint, in ``.fastckpt/parts-<history>-<step>-<key>``.

    There are ``files``, with the images of all nodes, and for each node that has written its own, durably, a
    ``part-<node>.json``: a manifest of these alone. Everything can be done again, and by any node. But the file that
    the user named is made only by nodes that were ``asked`` for it, not by any that finds the parts.
    """

    def __init__(self, layout: Layout, id: SaveId, share: Share, reader: CheckpointReader) -> None:
        self.id = id
        self._reader = reader
        self._layout = layout
        self._share = share
        self._place = layout.private / f"parts-{id.history}-{id.step}-{share.key}"
        self._files = self._place / FILES
        self._home = layout.home(id, share.target)
        self._asked = False

    def contribute(self, request: PublishRequest, copier: Copier, *, read_back: bool) -> None:
        """Write this node's part, unless it is there; on failure nothing is left of it, and the others' parts stay."""
        self._asked = True
        if self._at_home() or self._part(self._share.node):
            return
        self._layout.files.make_directory(self._files, parents=True)
        self._withdraw(request)  # files that a writer which died left
        with ExitStack() as on_failure:
            on_failure.callback(self._withdraw, request)
            part = request.manifest(write_images(request, self._files, self._layout.files, copier, read_back=read_back))
            with metrics.phase("persist.part", step=self.id.step, node=self._share.node):
                self._put(self._share.mark(part), self._place / name_of(self._share.node))
            on_failure.pop_all()

    def missing(self) -> list[int]:
        """The nodes that have no part there."""
        there = self._names()
        return [n for n in range(self._share.nodes) if name_of(n) not in there or not self._part(n)]

    def publish(self) -> Manifest | None:
        """Make it one checkpoint if all parts are there; its manifest once it is one, published by any node.

        Raises:
            OSError: Storage refused. The parts stay, and older checkpoints are as they were.
            BadCheckpoint: The parts do not go together.
        """
        files, target = self._layout.files, self._share.target
        named = named_file(self._layout, self.id, target) if self._asked else None
        with self._layout.publishing(first=self._share.node == 0) as mine:
            manifest = self._at_home()
            if mine and manifest is None and (manifest := self._assemble()):
                if self._asked and (name := self._layout.name_within(self.id, target)):
                    link_within(self._layout, self._files, name)
                commit = Commit(self._layout, self.id, target, self._files, named, self._reader)
                commit.run()
                commit.finish(manifest)
            if manifest is None:
                return None
            files.sync(self._home.parent)  # its publisher may have died before that
            if mine:
                if named:
                    named.put_of(self._home / MODEL)
                files.remove(self._place)
        return manifest

    def _names(self) -> set[str]:
        try:
            return {entry.name for entry in self._layout.files.entries(self._place)}
        except FileNotFoundError:
            return set()

    def _assemble(self) -> Manifest | None:
        """Write the manifest of all parts, if they are there."""
        # Each node looks many times: until all are there, it reads none.
        names = self._names()
        if any(name_of(node) not in names for node in range(self._share.nodes)):
            return None
        parts = [part for part in map(self._part, range(self._share.nodes)) if part]
        if len(parts) < self._share.nodes:
            return None
        with metrics.phase("persist.manifest", step=self.id.step):
            manifest = assemble(parts, self._share.target)
            self._put(manifest, self._files / NAME)
            self._layout.files.sync_tree(self._files)
        return manifest

    def _at_home(self) -> Manifest | None:
        """The manifest in the place where this checkpoint belongs, if it is of this one."""
        manifest = ours(self._home)
        if manifest is None or (manifest.id, manifest.target) != (self.id, self._share.target):
            return None
        return manifest if manifest.details.get("attempt", "") == self._share.attempt else None

    def _part(self, node: int) -> Manifest | None:
        """Return the part that a node has written, if it is there with its files unchanged; else None."""
        try:
            part = read_manifest(self._place, name_of(node))
            if part is None or part.id != self.id or not self._share.owns(part, node):
                return None
            for entry in part.files:
                check_size(entry, self._files / entry.name)
        except BadCheckpoint:
            return None
        return part

    def _put(self, manifest: Manifest, path: Path) -> None:
        draft = self._layout.draft("tmp")
        try:
            self._layout.files.write_text(draft, manifest.to_json())
            self._layout.files.rename(draft, path)
        except OSError:
            self._layout.files.remove(draft)
            raise

    def _withdraw(self, request: PublishRequest) -> None:
        """Remove this node's part, its record first."""
        self._layout.files.remove(self._place / name_of(self._share.node))
        for name in request.images:
            self._layout.files.remove(self._files / name)


class Contribution:
    """A node's part of a checkpoint, which is there; the others' may not be there yet."""

    def __init__(self, layout: Layout, parts: PartFiles) -> None:
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


def sweep(layout: Layout, reader: CheckpointReader) -> Iterator[Path]:
    """Publish complete parts; remove parts that are older than a checkpoint that counts, or long untouched.

    Call while nobody writes. Where locks do not reach other nodes, one of them may write nevertheless: so other parts
    stay until a publication makes them useless.
    """
    newer = dict(_newer(layout, reader.scan()))
    for id, place in layout.parts():
        share = _share_in(layout, place) if place in newer else None
        parts = PartFiles(layout, id, share, reader) if share else None
        if parts and parts.publish():
            yield place
        elif place not in newer or layout.idle(place) > ABANDONED:
            if share and parts:
                logger.warning("%s was never whole, and is removed: %s", id, lacking(share, parts.missing()))
            drop(layout, place)
            yield place


def settle(layout: Layout, reader: CheckpointReader) -> Iterator[Manifest | Unfinished]:
    """Publish complete parts that are newer than all checkpoints that count; returns these, and incomplete ones.

    Where there are no locks, the first node alone calls this.
    """
    for place, id in _newer(layout, reader.scan()):
        if share := _share_in(layout, place):
            parts = PartFiles(layout, id, replace(share, node=0), reader)
            try:
                missing = parts.missing()
                manifest = None if missing else _publish_within(layout, parts)
                yield manifest or Unfinished(id, lacking(share, missing))
            except (OSError, FastckptError) as error:
                yield Unfinished(id, f"it cannot be published: {error}")


def _publish_within(layout: Layout, parts: PartFiles) -> Manifest | None:
    with layout.writing():
        return parts.publish()


def _newer(layout: Layout, scan: Scan) -> Iterator[tuple[Path, SaveId]]:
    newest = max((stored.id for stored in scan.whole), default=None)
    return ((place, id) for id, place in layout.parts() if newest is None or id > newest)


def _share_in(layout: Layout, place: Path) -> Share | None:
    """Return the properties that all parts in a place share, by one of them; None if there is no whole one."""
    names = [entry.name for entry in layout.files.entries(place) if re.fullmatch(r"part-[0-9]{1,7}\.json", entry.name)]
    shares = (share_of(_read(place, name)) for name in names)
    return next((share for share in shares if share and place.name.endswith(share.key)), None)


def _read(place: Path, name: str) -> Manifest | None:
    try:
        return read_manifest(place, name)
    except BadCheckpoint:
        return None
