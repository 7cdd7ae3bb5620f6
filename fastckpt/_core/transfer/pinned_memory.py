"""Memory that a device reads and writes by itself: mapped files are registered with it, once per mapping."""

import contextlib
import logging
from typing import Any

import torch

logger = logging.getLogger("fastckpt")

PORTABLE = 1
"""cudaHostRegisterPortable: for all devices of this process."""


def pin(address: int, size: int, device: torch.device) -> bool:
    """Have the driver lock mapped memory, for all devices like this one; whether it did.

    Where it does not (a limit on locked memory, an accelerator other than CUDA), copies go by way of buffers.
    """
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):  # a thread's own is the first one: that of another rank
        code = int(_runtime().cudaHostRegister(address, size, PORTABLE))
        if code == 0:
            return True
        logger.info("%d bytes of shared memory cannot be pinned (CUDA error %d): copies are staged", size, code)
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)  # the next launch reports that error again, and so clears it
        return False


def unpin(address: int, device: torch.device) -> None:
    """Give memory back that was pinned for a device, before it is unmapped."""
    with torch.cuda.device(device):
        _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
