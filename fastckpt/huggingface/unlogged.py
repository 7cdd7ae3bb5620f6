"""The loss of steps since the last line of a Trainer's log, which transformers forgets when it resumes there."""

import json
from pathlib import Path
from typing import Any

from transformers import Trainer

from fastckpt._core.native.folder_checkpointer import Raw
from fastckpt._core.native.view import read_json
from fastckpt.huggingface._private import last_logged, loss_since, put_loss


def unlogged(trainer: Trainer) -> dict[str, Any]:
    """A file of this rank with that loss; none if the step has been logged."""
    since, world = last_logged(trainer), trainer.args.world_size
    if since == trainer.state.global_step:
        return {}
    text = json.dumps({"since": since, "loss": loss_since(trainer), "ranks": world})
    return {_name(trainer): Raw(text.encode(), may_end_with_spaces=True)}


def restore(trainer: Trainer, folder: Path) -> None:
    """Give a trainer the loss that as many ranks have saved there, if they have."""
    path = folder / _name(trainer)
    found = read_json(path, _is_sound) if path.is_file() else {"ranks": 0}
    # With another number of ranks the parts do not add up to the loss of the job.
    if found["ranks"] == trainer.args.world_size:
        put_loss(trainer, found["since"], found["loss"])


def _is_sound(found: Any) -> bool:
    kinds = {"ranks": (int,), "since": (int,), "loss": (int, float)}
    return isinstance(found, dict) and all(type(found.get(name)) in kind for name, kind in kinds.items())


def _name(trainer: Trainer) -> str:
    return f"unlogged_loss_{trainer.args.process_index}.json"
