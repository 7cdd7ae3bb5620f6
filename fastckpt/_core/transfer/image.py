"""One mapped file of a slot, filled in place."""

import os
import stat
from pathlib import Path

import torch

from fastckpt._core.format.plan import Plan
from fastckpt._core.format.skeleton import Skeleton
from fastckpt._core.format.structure import Number
from fastckpt._core.huge_pages import Mapping, is_in_memory
from fastckpt._core.transfer.host_copy import Copy
from fastckpt._core.transfer.pinned_memory import pin, unpin


class Image:
    """A worker's mapping of an image that the agent reserved, kept from save to save.

    The file never shrinks, and its bytes were reserved before it got its name, so that writing into the mapping
    cannot fail for want of memory.
    """

    def __init__(self, path: Path) -> None:
        """Map ``path`` and fault its pages in; raises OSError if it is not there, or is none of our files."""
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size == 0:
                raise OSError(f"{path} is no image ({stat.filemode(status.st_mode)}, {status.st_size} bytes)")
            self.size = status.st_size
            self._inode = (status.st_dev, status.st_ino)
            self._in_memory = is_in_memory(fd)
            self._mapping = Mapping(fd, self.size)
        finally:
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
        """Whether the name still leads to the file that is mapped."""
        try:
            status = self.path.lstat()
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._inode

    def pin(self, device: torch.device) -> None:
        """Have the device write to the mapping by itself, if it can; once, for that takes long.

        Never of a file on a disk: the kernel would not see what to write back.
        """
        if self._asked is None:
            self._asked, self._pinned = device, self._in_memory and pin(self.address, self.size, device)

    def install(self, plan: Plan) -> list[Copy]:
        """Write all of a plan but the bytes of its storages; returns the copies that are left to do.

        Where the last save had the same skeleton, only the numbers that changed are written.
        """
        if self._skeleton is not plan.skeleton:
            self._write_skeleton(plan.skeleton)
        self._write_numbers(plan)
        return list(zip(self._targets, plan.storages, self._sizes, strict=True))

    def _write_skeleton(self, skeleton: Skeleton) -> None:
        self._skeleton = None
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
            # 0.0 equals -0.0, and nan nothing: only what is equal and not zero is sure to have equal bytes
            changed = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b or not a]
        places = plan.skeleton.places
        for i in changed:
            offset, kind = places[i]
            kind.pack_into(self._mapping.view, offset, new[i])
        self._numbers = new

    def close(self) -> None:
        """Unmap."""
        if self._asked is not None and self._pinned:
            unpin(self.address, self._asked)
        self._mapping.close()
