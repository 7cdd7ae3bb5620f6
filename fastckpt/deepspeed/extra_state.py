"""State of a DeepSpeed checkpoint that does not pass through its checkpoint engine."""

import logging
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from torch import no_grad

from fastckpt._core.snapshot.rng_state import restore_rng, rng_state
from fastckpt._core.storage.store import is_url

logger = logging.getLogger("fastckpt")

SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")
"""Scripts that DeepSpeed puts next to the checkpoints of ZeRO."""


def own_state(engine: DeepSpeedEngine) -> dict[str, Any]:
    """A rank's random generators, and its buffers if it does not write the model: they may be others there."""
    buffers = {} if engine.save_non_zero_checkpoint else dict(engine.module.named_buffers())
    return {"rng": rng_state(), "buffers": {name: buffer.detach() for name, buffer in buffers.items()}}


@no_grad()
def restore_own(engine: DeepSpeedEngine, own: dict[str, Any]) -> None:
    """Restore a result of `own_state`."""
    restore_rng(own["rng"])
    for name, buffer in engine.module.named_buffers():
        # A buffer may have another shape in a model that was
        # changed: DeepSpeed's own loader judges the model, not this.
        if name in own["buffers"] and own["buffers"][name].shape == buffer.shape:
            buffer.copy_(own["buffers"][name])


def put_scripts(engine: DeepSpeedEngine, directory: str) -> None:
    """Put DeepSpeed's scripts next to the checkpoints, once for all ranks; they run from there."""
    package = find_spec("deepspeed")
    if engine.global_rank or package is None or is_url(directory) or not engine.zero_optimization():
        return
    for script in SCRIPTS:
        target = Path(directory, script)
        try:
            shutil.copyfile(Path(str(package.origin)).parent / "utils" / script, target)
            # Executable, as DeepSpeed makes them.
            target.chmod(0o744)
        # A convenience of DeepSpeed's: without the scripts the checkpoint is whole.
        except OSError as error:
            logger.warning("%s could not be put beside the checkpoints: %s", script, error)
