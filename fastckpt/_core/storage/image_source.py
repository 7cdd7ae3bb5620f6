"""An image that is to be published, and what is known of its bytes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from fastckpt.errors import BadCheckpoint


class BadSource(BadCheckpoint):
    """The bytes of an image are not those that it was committed with: they must not reach storage as a checkpoint."""


@dataclass(frozen=True)
class ImageSource:
    """A file to copy to storage.

    Attributes:
        path: Where it lies.
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
        """Raise BadSource unless this is what had to be found in the file."""
        if self.size not in (None, size):
            raise BadSource(f"{self.path} has {size} bytes; it was committed with {self.size}")
        if self.digest not in ("", digest):
            raise BadSource(
                f"{self.path} is damaged: its xxh3-128 is {digest}; it was {self.digest} once it was committed"
            )
