"""Checkpoints for transformers' Trainer."""

from fastckpt.huggingface.trainer import (
    CheckpointOptions,
    FastCheckpointMixin,
    FastCheckpointTrainer,
    FlashCkptTrainer,
    get_last_checkpoint,
)

__all__ = [
    "CheckpointOptions",
    "FastCheckpointMixin",
    "FastCheckpointTrainer",
    "FlashCkptTrainer",
    "get_last_checkpoint",
]
