"""Checkpoints for FSDP, HSDP and tensor parallelism: shards of each rank, or a full state dict."""

from fastckpt._core.session import SaveResult, StorageType
from fastckpt.fsdp.full import FsdpFullCheckpointer
from fastckpt.fsdp.shards import FsdpShardCheckpointer

__all__ = ["FsdpFullCheckpointer", "FsdpShardCheckpointer", "SaveResult", "StorageType"]
