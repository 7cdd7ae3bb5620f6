"""What `fastckpt.Checkpointer` is told of a DeepSpeed engine."""

from collections.abc import Mapping
from typing import Any, NoReturn

from fastckpt.errors import ConfigError


class Refused:
    """Takes the place of a framework that saves trainings."""

    @classmethod
    def parts(cls, parts: Mapping[str, Any], *, gradients: bool, staged: bool = False) -> NoReturn:
        """Raise ConfigError: an engine has its model, optimizer and scheduler in it, and divides their state itself."""
        raise ConfigError(
            "model is a DeepSpeedEngine, which saves its optimizer and scheduler by itself: use "
            "fastckpt.deepspeed.DeepSpeedCheckpointer(engine, checkpoint_dir) instead of fastckpt.Checkpointer"
        )
