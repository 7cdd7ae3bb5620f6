"""GPUDirect Storage: bytes go between the memory of a GPU and the scratch file, and not through that of the host."""

import ctypes
import errno
import logging
import os
import threading
from pathlib import Path

import torch

from fastckpt._core.io.unbuffered import read_some
from fastckpt._core.offload.scratch_file import ScratchFile
from fastckpt._core.offload.staging import bytes_at

logger = logging.getLogger("fastckpt")

LIBRARY = "libcufile.so.0"
DRIVER = Path("/proc/driver/nvidia-fs")
"""Path that the kernel module of GPUDirect Storage makes."""


class CuFile:
    """The scratch file, opened and registered by torch's `GdsFile`; OSErrors name the failed function.

    torch's own load_storage and save_storage hold the GIL while the disk works, so that the training would wait for
    each transfer (torch/csrc/cuda/GdsFile.cpp, 2.10 to 2.15). Called by ctypes, the same functions do not.

    Args:
        handle: Handle made by cuFileHandleRegister.
        unit: Bytes of which sizes and offsets are multiples.
        library: A library with cuFileRead and cuFileWrite, which is loaded already.

    Raises:
        OSError: The library is not loaded: torch does not use it, or has it within itself.
    """

    def __init__(self, handle: int, unit: int, library: str = LIBRARY) -> None:
        # The one that torch uses, and no other one: a handle means nothing to a second copy.
        loaded = ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_NOW, use_errno=True)
        self._handle, self._unit = handle, unit
        self._functions = {"read": loaded.cuFileRead, "write": loaded.cuFileWrite}
        for function in self._functions.values():
            function.restype = ctypes.c_ssize_t
            function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int64)

    def write(self, memory: torch.Tensor, offset: int) -> None:
        """Write bytes in whole units; no stream may have work that writes to them. Raises OSError."""
        self._transfer("write", memory, offset)

    def read(self, memory: torch.Tensor, offset: int) -> None:
        """Read bytes in whole units; no stream may have work on this memory. Raises OSError."""
        self._transfer("read", memory, offset)

    def _transfer(self, name: str, memory: torch.Tensor, offset: int) -> None:
        done, size = 0, memory.numel()
        while done < size:
            ctypes.set_errno(0)
            got = self._functions[name](self._handle, memory.data_ptr(), size - done, offset + done, done)
            if got == -1:
                number = ctypes.get_errno() or errno.EIO
                raise OSError(number, f"cuFile cannot {name}: {os.strerror(number)}")
            if got < self._unit:
                what = f"error {-got}" if got < 0 else f"{got} bytes of {size - done} at {offset + done}"
                raise OSError(errno.EIO, f"cuFile cannot {name}: {what}")
            done += got // self._unit * self._unit


class GpuDirectStorage:
    """The choice between GPUDirect Storage and pinned memory, made once, when the first bytes of a GPU are written.

    Args:
        file: Scratch file for the bytes.
        driver: Path that exists if the kernel module is loaded.
    """

    def __init__(self, file: ScratchFile, driver: Path = DRIVER) -> None:
        self._file, self._driver = file, driver
        self._lock = threading.Lock()
        self._gds: object = None
        self.cufile: CuFile | None = None
        """Transfers past the host; None: there are none, or that was not tried yet."""
        self.refusal = ""
        """Reason why there are no such transfers."""

    @property
    def way(self) -> str:
        """The way of bytes on GPUs; empty before the first."""
        return "GPUDirect Storage" if self.cufile else f"pinned memory ({self.refusal})" if self.refusal else ""

    def tried(self, device: torch.device, offset: int) -> CuFile | None:
        """Transfers past the host, or None; the first call tries them with two units of the file at this offset."""
        with self._lock:
            if not self.cufile and not self.refusal:
                self._try(device, offset)
        return self.cufile

    def _try(self, device: torch.device, offset: int) -> None:
        self.refusal = why_not(self._file, self._driver)
        if not self.refusal:
            try:
                # Held as long as the handle is used: it takes that back at its end.
                self._gds, cufile = opened(self._file)
                check(cufile, self._file, device, offset)
                self.cufile = cufile
            except (ImportError, OSError, RuntimeError) as error:
                self.refusal = str(error).splitlines()[0]
        logger.info("activations on GPUs are offloaded through %s", self.way)


def why_not(file: ScratchFile, driver: Path) -> str:
    """Return why GPUDirect Storage cannot be tried; empty if it can.

    Without its kernel module cuFile would work in a mode of its own, through the memory of the host, and leave a log
    file in the current directory.
    """
    if not driver.is_dir():
        return "the kernel module nvidia-fs is not loaded"
    if not file.direct:
        return f"{file.directory} has no O_DIRECT"
    return ""


def opened(file: ScratchFile) -> tuple[object, CuFile]:
    """The same file, opened once more by torch's `GdsFile`. Raises ImportError, OSError or RuntimeError."""
    from torch.cuda.gds import GdsFile

    path = f"/proc/self/fd/{file.descriptor}"  # it has no name
    os.close(os.open(path, os.O_RDWR | os.O_DIRECT))  # GdsFile would print a traceback if this failed
    gds = GdsFile(path, os.O_RDWR)
    assert gds.handle is not None
    return gds, CuFile(gds.handle, file.unit)


def check(cufile: CuFile, file: ScratchFile, device: torch.device, offset: int) -> None:
    """Write two units of the file by cuFile, and read them back both ways. Raises OSError if one differs."""
    wrote = torch.arange(2 * file.unit, device=device).remainder_(251).to(torch.uint8)
    by_host = torch.zeros(3 * file.unit, dtype=torch.uint8)
    start = -by_host.data_ptr() % file.unit
    by_device = torch.zeros_like(wrote)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    cufile.write(wrote, offset)
    read_some(file.descriptor, bytes_at(by_host.data_ptr() + start, 2 * file.unit), offset)
    cufile.read(by_device, offset)
    for found in (by_host[start : start + 2 * file.unit], by_device.cpu()):
        if not torch.equal(found, wrote.cpu()):
            raise OSError(errno.EIO, "cuFile did not write what it was given, or did not read what is there")
