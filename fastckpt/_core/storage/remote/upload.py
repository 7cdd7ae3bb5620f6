"""Uploads the images of a checkpoint, several at a time."""

from fastckpt._core import metrics
from fastckpt._core.format.manifest import FileEntry, Manifest
from fastckpt._core.storage.image_source import ImageSource
from fastckpt._core.storage.io.copier import Copier, Copy
from fastckpt._core.storage.local.publish import PublishRequest
from fastckpt._core.storage.remote.download import download
from fastckpt._core.storage.remote.objects import Objects
from fastckpt.errors import PersistError


def upload_images(objects: Objects, copier: Copier, request: PublishRequest, place: str) -> list[FileEntry]:
    """Upload images to a place, read them again if asked; raises BadSource as `ImageSource.compare`."""

    def upload(copy: Copy, image: tuple[str, ImageSource]) -> FileEntry:
        name, source = image
        object = f"{place}/{name}"
        with metrics.phase("persist.write", step=request.id.step, file=name):
            entry = FileEntry(name, *objects.upload(source.path, object, copy))
            source.compare(entry.size, entry.digest)
        if request.read_back:
            with metrics.phase("persist.read_back", step=request.id.step, file=name):
                download(objects, object, entry, None)
        return entry

    return copier.each(upload, list(request.images.items()))


def check_complete(objects: Objects, manifest: Manifest, place: str) -> None:
    """Raise PersistError unless the store has all that a manifest names."""
    found = objects.sizes(place)
    for entry in manifest.files:
        if found.get(entry.name) != entry.size:
            raise PersistError(
                f"{objects.url(place)}/{entry.name} was uploaded with {entry.size} bytes, but the store has "
                f"{found.get(entry.name, 'none')}. Save again; see whether somebody deletes objects there."
            )
