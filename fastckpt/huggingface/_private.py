"""Private names of transformers; tried with transformers 5.23.0."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer

SAVE_MODEL, SAVE_OPTIMIZER, SAVE_SCALER = "_save", "_save_optimizer_and_scheduler", "_save_scaler"
"""Methods of Trainer that a subclass may override."""


def save_model(trainer: Trainer, folder: Path, state_dict: dict[str, Any] | None) -> None:
    """Write the files of the model, with these weights; None for its own."""
    trainer._save(str(folder), state_dict=state_dict)


def save_optimizer(trainer: Trainer, folder: Path) -> None:
    """Write the states of the optimizer and the scheduler."""
    trainer._save_optimizer_and_scheduler(str(folder))


def save_scaler(trainer: Trainer, folder: Path) -> None:
    """Write the state of the gradient scaler."""
    trainer._save_scaler(str(folder))


def save_rng_state(trainer: Trainer, folder: Path) -> None:
    """Write the states of the random generators of this rank."""
    trainer._save_rng_state(str(folder))


def last_logged(trainer: Trainer) -> int:
    """The step of the newest line of the log."""
    return int(trainer._globalstep_last_logged)


def loss_since(trainer: Trainer) -> float:
    """The loss of the steps since that line."""
    return float(trainer._tr_loss.item())


def put_loss(trainer: Trainer, since: int, loss: float) -> None:
    """Go on with this loss of the steps since ``since``, where the newest line of the log is."""
    trainer._tr_loss = torch.tensor(loss, dtype=trainer._tr_loss.dtype, device=trainer._tr_loss.device)
    trainer._globalstep_last_logged = since
    trainer._total_loss_scalar -= loss  # of which train_loss is to have the steps since the resume alone


def ignored_keys(model: nn.Module) -> tuple[str, ...]:
    """Keys of the state that ``save_pretrained`` leaves out."""
    return tuple(model._keys_to_ignore_on_save or ())  # type: ignore[arg-type]


def has_adapters(model: nn.Module) -> bool:
    """Return whether adapters of PEFT were added to the model itself."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))
