"""The loss of steps since the last line of a Trainer's log, which transformers forgets when it resumes there."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from fastckpt._core.native.folder_checkpointer import Raw


def unlogged(trainer: Trainer) -> dict[str, Any]:
    """A file of this rank with that loss; none if the step has been logged."""
    since, world = trainer._globalstep_last_logged, trainer.args.world_size
    if since == trainer.state.global_step:
        return {}
    text = json.dumps({"since": since, "loss": trainer._tr_loss.item(), "ranks": world})
    return {_name(trainer): Raw(text.encode(), may_end_with_spaces=True)}


def restore(trainer: Trainer, folder: Path) -> None:
    """Give a trainer the loss that as many ranks have saved there, if they have."""
    path = folder / _name(trainer)
    found = json.loads(path.read_text()) if path.is_file() else {"ranks": 0}
    if found["ranks"] == trainer.args.world_size:
        trainer._tr_loss = torch.tensor(found["loss"], dtype=trainer._tr_loss.dtype, device=trainer._tr_loss.device)
        trainer._globalstep_last_logged = found["since"]
        trainer._total_loss_scalar -= found["loss"]  # of which train_loss is to have the steps since the resume alone


def _name(trainer: Trainer) -> str:
    return f"unlogged_loss_{trainer.args.process_index}.json"
