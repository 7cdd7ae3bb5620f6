"""Writes one checkpoint so that a crash at any instruction leaves the old or the new one whole."""

import contextlib
import errno
import logging
from functools import partial
from pathlib import Path

from fastckpt._core import metrics
from fastckpt._core.format.manifest import NAME, FileEntry, Manifest
from fastckpt._core.io.copier import Copier, Copy
from fastckpt._core.io.direct import digest_file
from fastckpt._core.io.durable import sync_tree, write_text
from fastckpt._core.io.modes import make_directory
from fastckpt._core.storage.image_source import ImageSource, PublishRequest
from fastckpt._core.storage.local.commit import Commit
from fastckpt._core.storage.local.layout import Layout
from fastckpt._core.storage.local.named_file import remove_with_draft
from fastckpt._core.storage.local.scan import CheckpointReader

logger = logging.getLogger(__name__)


class Publication:
    """One checkpoint on its way to storage. Made within `Layout.writing`, used once."""

    def __init__(
        self,
        layout: Layout,
        request: PublishRequest,
        copier: Copier,
        reader: CheckpointReader,
        *,
        read_back: bool = False,
    ) -> None:
        self._layout = layout
        self._request = request
        self._copier = copier
        self._read_back = read_back
        self._place = layout.draft("tmp")
        self._commit = Commit(layout, request.id, request.target, self._place, reader)

    def run(self) -> Manifest:
        """Write everything, then commit; on failure nothing of it is left and the old one is back."""
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._take_back)
            make_directory(self._place)
            files = write_images(self._request, self._place, self._copier, read_back=self._read_back)
            manifest = self._request.manifest(files)
            with metrics.phase("persist.manifest", step=self._request.id.step):
                write_text(self._place / NAME, manifest.to_json())
                sync_tree(self._place)
            self._commit.run()
            on_failure.pop_all()
        self._commit.finish(manifest)
        return manifest

    def _take_back(self) -> None:
        for step in (partial(remove_with_draft, self._layout, self._place), self._commit.bring_back):
            try:
                step()
            except OSError as error:
                logger.warning("cannot clean up in %s: %s. The next sweep will.", self._layout.private, error)


def write_images(request: PublishRequest, place: Path, copier: Copier, *, read_back: bool) -> list[FileEntry]:
    """Copy images to a place; their bytes are durable, their names not."""

    def write(copy: Copy, image: tuple[str, ImageSource]) -> FileEntry:
        name, source = image
        path = place / name
        with metrics.phase("persist.write", step=request.id.step, file=name):
            make_directory(path.parent, parents=True)
            size, digest = copy.file(source.path, path)
            source.compare(size, digest)
        if read_back:
            with metrics.phase("persist.read_back", step=request.id.step, file=name):
                _read_back(path, digest)
        return FileEntry(name, size, digest)

    return copier.each(write, list(request.sources.items()))


def _read_back(path: Path, digest: str) -> None:
    found = digest_file(path, direct=True)
    if found != digest:
        raise OSError(errno.EIO, f"what was written reads back otherwise: its xxh3-128 is {found}, not {digest}", path)
