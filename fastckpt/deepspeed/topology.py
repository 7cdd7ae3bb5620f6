"""The division of a DeepSpeed engine's state, and the check whether an engine can load another one's."""

import json
from pathlib import Path
from shlex import quote
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from fastckpt._core.native.view import read_json
from fastckpt.errors import ConfigError

NAME = "fastckpt.json"
"""The file that stores the topology; checkpoints that DeepSpeed wrote by itself have none."""
_UNIVERSAL = (
    "convert it, with `python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder {0} "
    "--output_folder {0}_universal`, and load that with {{'checkpoint': {{'load_universal': true}}}} in DeepSpeed's "
    "configuration"
)
_MODEL = "load the model alone, with load_optimizer_states=False"
_WEIGHTS = "load its weights into the model before deepspeed.initialize"


def shape_of(engine: DeepSpeedEngine) -> dict[str, Any]:
    """The properties of an engine on which names and contents of its files depend."""
    return {
        "zero_stage": int(engine.zero_optimization_stage()),
        "bf16": bool(engine.bfloat16_enabled()),
        "data_parallel": int(engine.seq_dp_world_size),
        "model_parallel": int(engine.mp_world_size),
    }


def written(engine: DeepSpeedEngine) -> bytes:
    """The contents of `NAME`."""
    return json.dumps({"framework": "deepspeed", **shape_of(engine)}).encode()


def read(path: Path) -> dict[str, Any]:
    """The topology stored in `NAME` there; raises BadCheckpoint if it is none."""
    found: dict[str, Any] = read_json(path, lambda it: isinstance(it, dict) and type(it.get("zero_stage")) is int)
    return found


def check_fits(saved: dict[str, Any], engine: DeepSpeedEngine, where: str, *, with_optimizer: bool) -> None:
    """Raise ConfigError if an engine cannot load a checkpoint of this shape, before anything of it is applied.

    Args:
        saved: The contents of `NAME`.
        where: The directory of the checkpoint, once it is on storage.
        with_optimizer: Whether states of the optimizer are loaded; those of the model alone depend on less.
    """
    now = shape_of(engine)
    stages = saved["zero_stage"], now["zero_stage"]
    unlike = [
        f"{name} {saved[name]}, now {now[name]}"
        for name in now
        if saved.get(name, now[name]) != now[name] and _matters(name, stages, with_optimizer=with_optimizer)
    ]
    # Stage 3 also partitions the weights; below it the model's file is the same at every stage.
    if _kind(stages[0]) != _kind(stages[1]) and (with_optimizer or 3 in stages):
        unlike.append(f"zero_stage {stages[0]}, now {stages[1]}")
    if unlike:
        raise ConfigError(
            f"{where} was saved with {'; '.join(unlike)}: DeepSpeed loads it in the shape in which it was saved. Train "
            f"on with that, or {_remedy(stages, where)}."
        )


def _remedy(stages: tuple[int, int], where: str) -> str:
    """A remedy that DeepSpeed has. Universal checkpoints of stage 3 load into stage 3 alone."""
    if _kind(stages[0]) == _kind(stages[1]) != 0:
        return _UNIVERSAL.format(quote(where))
    return _WEIGHTS if 3 in stages else _MODEL


def _kind(stage: int) -> int:
    """Stages 1 and 2 have the same files."""
    return 1 if stage == 2 else stage


def _matters(name: str, stages: tuple[int, int], *, with_optimizer: bool) -> bool:
    if name in ("zero_stage", "bf16"):  # of stages the kind matters, see above
        return with_optimizer and name == "bf16"
    return name != "data_parallel" or (with_optimizer and stages != (0, 0)) or stages[0] == 3
