"""The images that are to be published as a checkpoint, and their known sizes and digests."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import JSON, FileEntry, Manifest
from fastckpt.errors import BadCheckpoint


class BadSource(BadCheckpoint):
    """The bytes of an image differ from the committed ones: they must not reach storage as a checkpoint."""


@dataclass(frozen=True)
class ImageSource:
    """A file to copy to storage.

    Attributes:
        path: Its path.
        size: Bytes that it must have; None if that is not known.
        digest: The xxh3-128 that it must have; empty if that is not known.
    """

    path: Path
    size: int | None = None
    digest: str = ""

    @classmethod
    def of(cls, image: "Path | ImageSource") -> Self:
        """A file of which nothing is known, if it is just a path."""
        return cls(image) if isinstance(image, Path) else cls(image.path, image.size, image.digest)

    def compare(self, size: int, digest: str) -> None:
        """Raise BadSource if the size or digest of the file differs from the known one."""
        if self.size not in (None, size):
            raise BadSource(f"{self.path} has {size} bytes; it was committed with {self.size}")
        if self.digest not in ("", digest):
            raise BadSource(
                f"{self.path} is damaged: its xxh3-128 is {digest}; it was {self.digest} once it was committed"
            )


@dataclass(frozen=True)
class PublishRequest:
    """A checkpoint to publish, or a node's part of one.

    Attributes:
        id: Id of the save.
        images: The files by their names in the checkpoint, perhaps with known sizes and digests.
        target: Path that the user chose for ``model.pt``, or for the directory of all files if it ends with "/"; empty
            for the default.
        parent: Checkpoint from which this history was resumed.
        world_size: Ranks of the job.
        details: Other values to record.
    """

    id: SaveId
    images: Mapping[str, Path | ImageSource]
    target: str = ""
    parent: SaveId | None = None
    world_size: int = 1
    details: Mapping[str, JSON] = field(default_factory=dict)

    @property
    def sources(self) -> dict[str, ImageSource]:
        """The images, with their known sizes and digests."""
        return {name: ImageSource.of(image) for name, image in self.images.items()}

    def at(self, target: str) -> "PublishRequest":
        """The same with a target as a manifest has it; raises BadCheckpoint if no manifest could describe it."""
        request = replace(self, target=target)
        request.manifest([FileEntry(name, 0, "0" * 32) for name in self.images]).to_json()
        return request

    def manifest(self, files: Iterable[FileEntry]) -> Manifest:
        """The manifest of these files, as of now."""
        return Manifest(
            id=self.id,
            parent=self.parent,
            files=tuple(files),
            world_size=self.world_size,
            time=time.time(),
            details=self.details,
            target=self.target,
        )
