"""Checkpoints for accelerate, in the files of ``save_state``."""

from fastckpt._core.session import SaveResult, StorageType
from fastckpt.accelerate.accelerator_state import AccelerateCheckpointer

__all__ = ["AccelerateCheckpointer", "SaveResult", "StorageType"]
