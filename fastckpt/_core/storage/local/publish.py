"""Writes one checkpoint so that a crash at any instruction leaves the old or the new one whole."""

import errno
from pathlib import Path

from fastckpt._core import metrics
from fastckpt._core.format.manifest import NAME, FileEntry, Manifest
from fastckpt._core.io.copier import Copier, Copy
from fastckpt._core.io.direct import digest_file
from fastckpt._core.io.directory_root import DirectoryRoot
from fastckpt._core.storage.image_source import ImageSource, PublishRequest
from fastckpt._core.storage.local.commit import Commit
from fastckpt._core.storage.local.layout import Layout
from fastckpt._core.storage.local.named_file import link_within, named_file
from fastckpt._core.storage.local.scan import CheckpointReader


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
        self._named = named_file(layout, request.id, request.target)
        self._commit = Commit(layout, request.id, request.target, self._place, self._named, reader)

    def run(self) -> Manifest:
        """Write everything, then commit; on failure nothing of it is left and the old one is back."""
        files, request = self._layout.files, self._request
        try:
            files.make_directory(self._place)
            entries = write_images(request, self._place, files, self._copier, read_back=self._read_back)
            manifest = request.manifest(entries)
            with metrics.phase("persist.manifest", step=request.id.step):
                files.write_text(self._place / NAME, manifest.to_json())
                files.sync_tree(self._place)
            if name := self._layout.name_within(request.id, request.target):
                link_within(self._layout, self._place, name)
            self._commit.run()
        except BaseException:
            files.remove(self._place)
            raise
        self._commit.finish(manifest)
        return manifest


def write_images(
    request: PublishRequest, place: Path, files: DirectoryRoot, copier: Copier, *, read_back: bool
) -> list[FileEntry]:
    """Copy images to a place; their bytes are durable, their names not."""

    def write(copy: Copy, image: tuple[str, ImageSource]) -> FileEntry:
        name, source = image
        path = place / name
        with metrics.phase("persist.write", step=request.id.step, file=name):
            files.make_directory(path.parent, parents=True)
            size, digest = copy.file(source.path, path, files)
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
