"""Storage in shared memory for torch.distributed.checkpoint (DCP)."""

from fastckpt._core.session import SaveResult, StorageType
from fastckpt.dcp.reader import SharedMemoryReader
from fastckpt.dcp.stager import SharedMemoryStager
from fastckpt.dcp.writer import SharedMemoryWriter

__all__ = ["SaveResult", "SharedMemoryReader", "SharedMemoryStager", "SharedMemoryWriter", "StorageType"]
