"""Checkpoints for Lightning: a CheckpointIO, strategies and a callback."""

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
