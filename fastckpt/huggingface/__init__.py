"""Checkpoints for transformers' Trainer: to memory as often as every step, to storage in the background."""

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
