"""Gathers several nodes' parts of one checkpoint at a URL; a node that finds all parts there writes the manifest."""

from collections.abc import Callable, Mapping

from fastckpt._core import metrics
from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import MAX_TEXT, MODEL, NAME, Manifest
from fastckpt._core.io.copier import Copier
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.local.quarantine import WHY
from fastckpt._core.storage.remote.catalog import Catalog, id_of, is_shared, shared_place
from fastckpt._core.storage.remote.client_errors import ExplainedErrors, LoggedErrors
from fastckpt._core.storage.remote.objects import Objects
from fastckpt._core.storage.remote.upload import check_complete, upload_images
from fastckpt._core.storage.share import Share, Unfinished, assemble, lacking, name_of, share_of
from fastckpt.errors import BadCheckpoint, PersistError


class PartObjects:
    """The parts of one checkpoint, in a place that all its nodes know: images, and a manifest of each node's own.

    Nothing need be locked: the manifests that two nodes make of the same parts are the same.
    """

    def __init__(self, objects: Objects, catalog: Catalog, id: SaveId, share: Share) -> None:
        self.id = id
        self._catalog = catalog
        self.place = shared_place(id, share.key)
        self._objects = objects
        self._share = share
        self._asked = False

    def contribute(self, request: PublishRequest, copier: Copier, *, read_back: bool) -> None:
        """Write this node's part, unless it is there."""
        self._asked = True
        sizes = self._sizes()
        # A retry, or another agent of this node, has written it: equal bytes by the same key.
        if NAME in sizes or self._part(self._share.node, sizes):
            return
        part = request.manifest(upload_images(self._objects, copier, request, self.place, read_back=read_back))
        # Before the part's manifest: from then on other nodes rely on these objects.
        check_complete(self._objects, part, self.place)
        with metrics.phase("persist.part", step=self.id.step, node=self._share.node):
            self._objects.put(f"{self.place}/{name_of(self._share.node)}", self._share.mark(part).to_json().encode())

    def missing(self) -> list[int]:
        """The nodes that have no part there."""
        sizes = self._sizes()
        return [] if NAME in sizes else [n for n in range(self._share.nodes) if self._part(n, sizes) is None]

    def complete(self) -> tuple[Manifest | None, bool]:
        """The manifest once it is there, and whether this call wrote it."""
        sizes = self._sizes()
        if NAME in sizes:
            return self._read(NAME, sizes), False
        if any(name_of(node) not in sizes for node in range(self._share.nodes)):
            return None, False  # each node looks many times: until all are there, it reads none
        parts = [part for node in range(self._share.nodes) if (part := self._part(node, sizes))]
        if len(parts) < self._share.nodes:
            return None, False
        manifest = assemble(parts, self._share.target)
        # The user's copy first: once the manifest is there the checkpoint counts, and the copy belongs to it. A process
        # that was not asked for a copy makes none: objects alone prove nothing.
        if manifest.target and self._asked:
            self._objects.copy(f"{self.place}/{MODEL}", manifest.target)
        with metrics.phase("persist.manifest", step=self.id.step):
            # Two nodes may both come here: they write the same bytes, so the last one changes nothing.
            self._objects.put(f"{self.place}/{NAME}", manifest.to_json().encode())
        return manifest, True

    def remove_older(self) -> None:
        """Remove parts of older checkpoints that never became whole."""
        with LoggedErrors("remove the parts of older checkpoints"):
            for place, _ in self._catalog.scan().unfinished:
                id = id_of(place)
                if is_shared(place) and id and id < self.id:
                    self._objects.remove_all(place)

    def settle(self, finish: Callable[[Manifest, str], None]) -> Manifest | Unfinished:
        """The manifest, which is written if all parts are there, or the missing parts."""
        if missing := self.missing():
            return Unfinished(self.id, lacking(self._share, missing))
        manifest, here = self.complete()
        if manifest and here:
            finish(manifest, self.place)
        return manifest or Unfinished(self.id, "its parts have changed just now")

    def _sizes(self) -> Mapping[str, int]:
        sizes = self._objects.sizes(self.place)
        if WHY in sizes:
            raise PersistError(f"{self._objects.url(self.place)} was quarantined as bad; {self.id} is not saved again")
        return sizes

    def _part(self, node: int, sizes: Mapping[str, int]) -> Manifest | None:
        part = self._read(name_of(node), sizes) if name_of(node) in sizes else None
        if part is None or part.id != self.id or not self._share.owns(part, node):
            return None
        return part if all(sizes.get(entry.name) == entry.size for entry in part.files) else None

    def _read(self, name: str, sizes: Mapping[str, int]) -> Manifest | None:
        return _manifest(self._objects.read(f"{self.place}/{name}", min(sizes[name], MAX_TEXT + 1)))


def share_in(objects: Objects, place: str) -> Share | None:
    """Return the properties that all parts in a place share, by one of them; None if there is no whole one."""
    for name, size in objects.sizes(place).items():
        if name.startswith("part-") and name.endswith(".json"):
            share = share_of(_manifest(objects.read(f"{place}/{name}", min(size, MAX_TEXT + 1))))
            # A part of another save that was copied here has another key.
            if share and place.endswith(share.key):
                return share
    return None


def _manifest(text: bytes | None) -> Manifest | None:
    try:
        return Manifest.from_json(text or b"")
    except BadCheckpoint:
        return None


class RemoteContribution:
    """A node's part of a checkpoint at a URL, which is there; the others' may not be there yet."""

    def __init__(self, url: str, gathering: PartObjects, finish: Callable[[Manifest, str], None]) -> None:
        self.id = gathering.id
        self._url = url
        self._gathering = gathering
        self._finish = finish

    def complete(self) -> Manifest | None:
        """Publish the checkpoint if all parts are there; its manifest once that is done, by whichever node.

        Raises PersistError if the store refuses, BadCheckpoint if the parts do not go together.
        """
        with ExplainedErrors(f"publish {self.id}", self._url):
            manifest, here = self._gathering.complete()
            if manifest and here:
                self._finish(manifest, self._gathering.place)
                self._gathering.remove_older()
        return manifest

    def missing(self) -> list[int]:
        """The nodes that have not written their part."""
        with ExplainedErrors(f"look for the parts of {self.id}", self._url):
            return self._gathering.missing()
