"""Memory through which bytes go between tensors and a file: whole pages, pinned if they come from a device."""

import ctypes
import mmap
import threading

import torch

STAGING = 8 << 20
"""Bytes that each thread stages at once."""


class StagingMemory(threading.local):
    """The staging memory of a thread, made when it is first needed."""

    def __init__(self) -> None:
        self._host: torch.Tensor | None = None
        self._pinned: torch.Tensor | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def buffer(self, device: torch.device) -> torch.Tensor:
        """A buffer for bytes of tensors of a device."""
        if device.type == "cpu":
            if self._host is None:
                # An anonymous mapping begins at a page, which torch's memory does not.
                self._host = torch.frombuffer(mmap.mmap(-1, STAGING), dtype=torch.uint8)
            return self._host
        if self._pinned is None:
            self._pinned = torch.empty(STAGING, dtype=torch.uint8, pin_memory=True)
        return self._pinned

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """A stream of this thread's own, so that copies overlap with training."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


def bytes_at(address: int, size: int) -> memoryview:
    """The bytes of this process at an address, which must stay allocated as long as the view is used."""
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, without a copy."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    start, size = tensor.storage_offset() * tensor.element_size(), tensor.numel() * tensor.element_size()
    return flat.set_(tensor.untyped_storage(), start, (size,), (1,))
