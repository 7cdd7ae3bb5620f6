"""Checkpoints of accelerate: the files of `save_state` in memory and on storage, and `load_state` pointed at them."""

from fastckpt._core.session import SaveResult, StorageType
from fastckpt.accelerate.accelerator_state import AccelerateCheckpointer

__all__ = ["AccelerateCheckpointer", "SaveResult", "StorageType"]
