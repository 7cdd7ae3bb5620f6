"""Uploads the images of a checkpoint, several at a time."""

import os
from contextlib import ExitStack
from pathlib import Path

import xxhash

from fastckpt._core import metrics
from fastckpt._core.format.manifest import FileEntry, Manifest
from fastckpt._core.io.copier import Copier, Copy
from fastckpt._core.io.direct import CopyPacing
from fastckpt._core.io.regular_file import open_regular
from fastckpt._core.storage.image_source import ImageSource, PublishRequest
from fastckpt._core.storage.remote.download import download
from fastckpt._core.storage.remote.objects import Objects, part_size
from fastckpt.errors import BadCheckpoint, PersistError


def upload_images(
    objects: Objects, copier: Copier, request: PublishRequest, place: str, *, read_back: bool
) -> list[FileEntry]:
    """Upload images to a place, read them again if asked; raises BadSource as `ImageSource.compare`."""

    def upload(copy: Copy, image: tuple[str, ImageSource]) -> FileEntry:
        name, source = image
        object = f"{place}/{name}"
        with metrics.phase("persist.write", step=request.id.step, file=name):
            # 1. upload, digesting the very bytes that are sent   2. compare with the image's known size and digest
            # 3. if asked, read it back from the store
            entry = FileEntry(name, *upload_file(objects, source.path, object, copy))
            source.compare(entry.size, entry.digest)
        if read_back:
            with metrics.phase("persist.read_back", step=request.id.step, file=name):
                download(objects, object, entry, None)
        return entry

    return copier.each(upload, list(request.sources.items()))


def check_complete(objects: Objects, manifest: Manifest, place: str) -> None:
    """Raise PersistError unless the store has all that a manifest names."""
    found = objects.sizes(place)
    for entry in manifest.files:
        if found.get(entry.name) != entry.size:
            raise PersistError(
                f"{objects.url(place)}/{entry.name} was uploaded with {entry.size} bytes, but the store has "
                f"{found.get(entry.name, 'none')}. Save again; see whether somebody deletes objects there."
            )


def upload_file(objects: Objects, source: Path, name: str, pace: CopyPacing) -> tuple[int, str]:
    """Make an object of a file; its size in bytes, and its xxh3-128 digest in 32 hexadecimal digits.

    Memory holds a few parts at a time. After a failure nothing is left of it soon, as far as the store can be
    reached.
    """
    # 1. a small file in one request   2. a large one in parts, of which memory holds a few   3. the object, made of its
    # parts; after a failure they are aborted
    digest = xxhash.xxh3_128()
    with ExitStack() as on_exit:
        reader = open_regular(source, follow=True)
        on_exit.callback(os.close, reader)
        size = os.fstat(reader).st_size
        part = part_size(size)
        # One request: a multipart upload needs three at least.
        if size <= part:
            data = _read_exactly(reader, size, 0)
            pace.wait_for(size)
            digest.update(data)
            objects.put(name, data)
            return size, digest.hexdigest()
        sink = objects.sink(name)
        on_failure = on_exit.enter_context(ExitStack())
        on_failure.callback(objects.later, f"abort what was uploaded of {objects.url(name)}", sink.discard)
        for offset in range(0, size, part):
            data = _read_exactly(reader, min(part, size - offset), offset)
            pace.wait_for(len(data))
            digest.update(data)
            sink.write(data)
        sink.commit()
        on_failure.pop_all()
    return size, digest.hexdigest()


def _read_exactly(reader: int, size: int, offset: int) -> bytes:
    data = os.pread(reader, size, offset)
    if len(data) != size:
        raise BadCheckpoint(f"a file ended at {offset + len(data)} while it was uploaded; {offset + size} expected")
    return data
