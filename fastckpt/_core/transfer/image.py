"""Mapped files of slots, filled in place, and pinned for a device that writes to them by itself."""

import contextlib
import logging
import os
import stat
import threading
from collections.abc import Iterable, Mapping
from itertools import compress
from operator import ne, not_, or_
from pathlib import Path
from typing import Any

import torch

from fastckpt._core.format.plan import Plan
from fastckpt._core.format.skeleton import Skeleton
from fastckpt._core.format.structure import Number
from fastckpt._core.huge_pages import Mapping as MappedFile
from fastckpt._core.huge_pages import is_in_memory
from fastckpt._core.transfer.host_copy import Copy

logger = logging.getLogger("fastckpt")

PORTABLE = 1
"""cudaHostRegisterPortable: for all devices of this process."""


class Image:
    """A worker's mapping of an image that the agent reserved, kept from save to save.

    The file never shrinks, and its bytes were reserved before it got its name, so that writing into the mapping
    cannot fail for want of memory.
    """

    def __init__(self, path: Path) -> None:
        """Map ``path`` and fault its pages in; raises OSError if it does not exist or is no regular file."""
        # Nothing in an arena is trusted: O_NOFOLLOW refuses a link, O_NONBLOCK keeps a FIFO from blocking the open.
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size == 0:
                raise OSError(f"{path} is no image ({stat.filemode(status.st_mode)}, {status.st_size} bytes)")
            self.size = status.st_size
            self._inode = (status.st_dev, status.st_ino)
            self._in_memory = is_in_memory(fd)
            self._mapping = MappedFile(fd, self.size)
        finally:
            # The mapping keeps the file; a descriptor for each image would count against the limit of open files.
            os.close(fd)
        self.path = path
        self.address = self._mapping.address
        self._asked: torch.device | None = None
        self._pinned = False
        self._skeleton: Skeleton | None = None
        self._numbers: list[Number] = []
        self._targets: list[int] = []
        self._sizes: list[int] = []

    def is_current(self) -> bool:
        """Return whether the name still leads to the file that is mapped."""
        try:
            status = self.path.lstat()
        except OSError:
            return False
        # By inode, not by name: the agent replaces an image that grows by a new file under the same name.
        return (status.st_dev, status.st_ino) == self._inode

    def pin(self, device: torch.device) -> None:
        """Pin the mapping, so that the device writes to it by itself, if it can; once, because that takes long.

        A file on a disk is never pinned: the kernel would not see which pages to write back.
        """
        if self._asked is None:
            # cudaHostRegister takes long for many GB, so a failure is remembered as well and not tried at each save.
            self._asked, self._pinned = device, self._in_memory and pin(self.address, self.size, device)

    def install(self, plan: Plan) -> list[Copy]:
        """Write all of a plan but the bytes of its storages; returns the copies that are left to do.

        If the last save had the same skeleton, only the numbers that changed are written.
        """
        # Identity is enough: a planner returns the same skeleton object as long as the structure is unchanged.
        if self._skeleton is not plan.skeleton:
            self._write_skeleton(plan.skeleton)
        self._write_numbers(plan)
        return list(zip(self._targets, plan.storages, self._sizes, strict=True))

    def _write_skeleton(self, skeleton: Skeleton) -> None:
        self._skeleton = None  # if writing fails half-way, the next save writes all again
        for offset, data in (*skeleton.segments, skeleton.padding(self.size)):
            self._mapping.view[offset : offset + len(data)] = data
        self._numbers = []
        self._targets = [self.address + gap.offset for gap in skeleton.gaps]
        self._sizes = [gap.size for gap in skeleton.gaps]
        self._skeleton = skeleton

    def _write_numbers(self, plan: Plan) -> None:
        old, new = self._numbers, plan.numbers
        if len(old) != len(new):
            changed = list(range(len(new)))
        else:
            # 0.0 equals -0.0, and NaN nothing: only numbers that are equal and not zero are sure to have equal bytes
            is_unsure = map(or_, map(ne, old, new), map(not_, old))
            changed = [*compress(range(len(new)), is_unsure)]
        places = plan.skeleton.places
        for i in changed:
            offset, kind = places[i]
            kind.pack_into(self._mapping.view, offset, new[i])
        self._numbers = new

    def close(self) -> None:
        """Unmap."""
        if self._asked is not None and self._pinned:
            # Before munmap: the driver must not keep a registration of addresses that the kernel may give to others.
            unpin(self.address, self._asked)
        self._mapping.close()


class ImageCache:
    """Images by their paths.

    Attributes:
        device: An accelerator to pin them for, so that it writes to them by itself; None if there is none.
    """

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self._images: dict[Path, Image] = {}
        self._lock = threading.Lock()

    def _image(self, path: Path) -> Image:
        """The image of the file that is at a path now; raises OSError if there is none."""
        with self._lock:
            # The agent has put another file there, or the arena was removed and made again: bytes written to the old
            # mapping would be in no slot.
            if path in self._images and not self._images[path].is_current():
                self._images.pop(path).close()
        return self.map(path)

    def map(self, path: Path) -> Image:
        """The image at a path, also if its file was replaced since it was mapped: another thread may use it."""
        with self._lock:
            if path not in self._images:
                self._images[path] = Image(path)
            if self.device is not None:
                self._images[path].pin(self.device)
            return self._images[path]

    def install(self, slot: Path, plans: Mapping[str, Plan]) -> tuple[dict[str, Image], list[Copy]]:
        """Write all of a slot's images but the bytes of storages; returns them, and the copies that are left to do."""
        images = {name: self._image(slot / name) for name in plans}
        return images, [copy for name, plan in plans.items() for copy in images[name].install(plan)]

    def have(self, slot: Path, sizes: Mapping[str, int]) -> bool:
        """Return whether a slot's images of these sizes in bytes are mapped and their files still in place."""
        images = {name: self._images.get(slot / name) for name in sizes}
        return all(image and image.size == sizes[name] and image.is_current() for name, image in images.items())

    def unmap(self, slot: Path, sizes: Mapping[str, int]) -> None:
        """Unmap the images of a slot that do not have these sizes, and all whose files were replaced.

        The kernel frees the memory of a removed file only when nobody maps it.
        """
        with self._lock:
            wanted = {slot / name: size for name, size in sizes.items()}
            for path, image in list(self._images.items()):
                is_other = path.is_relative_to(slot) and image.size != wanted.get(path)
                if is_other or not image.is_current():
                    self._images.pop(path).close()

    def close(self) -> None:
        """Unmap all, when nothing writes to them."""
        with self._lock:
            for image in self._images.values():
                image.close()
            self._images.clear()


def removed(images: Iterable[Image]) -> list[Path]:
    """The paths of images whose files were removed or replaced: bytes written to their mappings are in no slot."""
    return [image.path for image in images if not image.is_current()]


def pin(address: int, size: int, device: torch.device) -> bool:
    """Have the driver pin mapped memory, for all devices of this kind; returns whether it did.

    If it does not (a limit on locked memory, an accelerator other than CUDA), copies go by way of buffers.
    """
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):  # a new thread's current device is the first one, which is another rank's
        code = int(_runtime().cudaHostRegister(address, size, PORTABLE))
        if code == 0:
            return True
        logger.info("%d bytes of shared memory cannot be pinned (CUDA error %d): copies are staged", size, code)
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)  # CUDA keeps the error; the next launch reports it once more and clears it
        return False


def unpin(address: int, device: torch.device) -> None:
    """Unpin memory that was pinned for a device, before it is unmapped."""
    with torch.cuda.device(device):
        _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
