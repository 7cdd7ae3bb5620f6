"""Checkpoints of Lightning: a CheckpointIO for memory and storage, strategies in which all ranks use it, a callback."""

from fastckpt.lightning.callback import MemoryCheckpoint
from fastckpt.lightning.checkpoint_io import NEWEST, FastCheckpointIO, StorageType
from fastckpt.lightning.strategies import FastDDPStrategy, FastSingleDeviceStrategy

__all__ = [
    "NEWEST",
    "FastCheckpointIO",
    "FastDDPStrategy",
    "FastSingleDeviceStrategy",
    "MemoryCheckpoint",
    "StorageType",
]
