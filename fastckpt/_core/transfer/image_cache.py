"""The images that a writer has mapped, each once, whichever thread needs it first."""

import threading
from collections.abc import Mapping
from pathlib import Path

import torch

from fastckpt._core.transfer.image import Image


class ImageCache:
    """Images by their paths.

    Attributes:
        device: An accelerator that is to write to them by itself, if it can; None if there is none.
    """

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self._images: dict[Path, Image] = {}
        self._lock = threading.Lock()

    def image(self, path: Path) -> Image:
        """The image that is at a path now; raises OSError if there is none."""
        with self._lock:
            if path in self._images and not self._images[path].is_current():
                self._images.pop(path).close()
        return self.map(path)

    def map(self, path: Path) -> Image:
        """The image at a path as it was mapped first: it may be in use by another thread."""
        with self._lock:
            if path not in self._images:
                self._images[path] = Image(path)
            if self.device is not None:
                self._images[path].pin(self.device)
            return self._images[path]

    def have(self, slot: Path, sizes: Mapping[str, int]) -> bool:
        """Whether a slot's images of these sizes in bytes are mapped, and there."""
        images = {name: self._images.get(slot / name) for name in sizes}
        return all(image and image.size == sizes[name] and image.is_current() for name, image in images.items())

    def unmap(self, slot: Path, sizes: Mapping[str, int]) -> None:
        """Let go of all of a slot but those that are to have these sizes, and have them; and of all that were replaced.

        Their memory is free only then.
        """
        with self._lock:
            wanted = {slot / name: size for name, size in sizes.items()}
            for path, image in list(self._images.items()):
                is_other = path.is_relative_to(slot) and image.size != wanted.get(path)
                if is_other or not image.is_current():
                    self._images.pop(path).close()

    def close(self) -> None:
        """Let go of all, when nothing writes to them."""
        with self._lock:
            for image in self._images.values():
                image.close()
            self._images.clear()
