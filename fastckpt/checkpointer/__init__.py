"""Checkpoints in three lines of a training loop."""

from fastckpt._core.session import SaveResult, StorageType
from fastckpt.checkpointer.checkpointer import Checkpointer

__all__ = ["Checkpointer", "SaveResult", "StorageType"]
