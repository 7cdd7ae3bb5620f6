"""Mistakes with DdpCheckpointer: what is saved, under which step, and how."""

import argparse
import dataclasses
import pathlib
from typing import Any

import numpy as np
import torch

from fastckpt.ddp import DdpCheckpointer, KeepLatestStepStrategy, StorageType
from fastckpt.errors import ArenaTooSmall, BadCheckpoint, ConfigError, FastckptError, NotLoadable, StepError
from tests.e2e.mistakes.table import WARNING, WORKS, Scene, answered, network, save

DISK = StorageType.DISK


@dataclasses.dataclass
class Settings:
    rate: float = 1.0


@answered(TypeError, value="path is StorageType.DISK", limit="a path", remedy="storage_type=StorageType.DISK")
def storage_type_as_path(scene: Scene) -> None:
    save(scene.directory, lambda c, step, state: c.save_checkpoint(step, state, DISK))


@answered(ConfigError, value="storage_type is 'disk'", limit="MEMORY or", remedy="did you mean StorageType.DISK?")
def storage_type_as_text(scene: Scene) -> None:
    save(scene.directory, lambda c, step, state: c.save_checkpoint(step, state, storage_type="disk"))


@answered(TypeError, value="step is a dict", limit="a whole number", remedy="save_checkpoint(step, state_dict")
def step_and_state_swapped(scene: Scene) -> None:
    save(scene.directory, lambda c, step, state: c.save_checkpoint(state, step))


@answered(TypeError, value="step is '0'", limit="a whole number", remedy="give int(step)")
def step_as_text(scene: Scene) -> None:
    save(scene.directory, lambda c, step, state: c.save_checkpoint(str(step), state))


@answered(StepError, value="step -1", limit="whole numbers from 0", remedy="give")
def step_below_zero(scene: Scene) -> None:
    save(scene.directory, lambda c, step, state: c.save_checkpoint(-1, state))


@answered(StepError, value="step 9 comes after step 10", limit="must not go back", remedy="resume_path=")
def steps_backwards(scene: Scene) -> None:
    save(scene.directory, lambda c, step, state: c.save_checkpoint(10 - step, state))


@answered(AttributeError, value="state['fn']", limit="cannot be saved", remedy="leave it out")
def state_with_a_lambda(scene: Scene) -> None:
    save(scene.directory, lambda c, step, state: c.save_checkpoint(step, {**state, "fn": lambda x: x}))


@answered(NotLoadable, value="state['loss']", limit="weights_only", remedy="weights_only=False")
def state_with_a_numpy_scalar(scene: Scene) -> None:
    save(scene.directory, lambda c, step, state: c.save_checkpoint(step, {**state, "loss": np.float64(1.5)}))


@answered(NotLoadable, value="state['hist']", limit="weights_only", remedy="weights_only=False")
def state_with_a_numpy_array(scene: Scene) -> None:
    save(scene.directory, lambda c, step, state: c.save_checkpoint(step, {**state, "hist": np.zeros(3)}))


@answered(NotLoadable, value="state['settings']", limit="weights_only", remedy="weights_only=False")
def state_with_a_dataclass(scene: Scene) -> None:
    save(scene.directory, lambda c, step, state: c.save_checkpoint(step, {**state, "settings": Settings()}))


@answered(NotLoadable, value="state['args']", limit="weights_only", remedy="weights_only=False")
def state_with_arguments(scene: Scene) -> None:
    given = argparse.Namespace(lr=1)
    save(scene.directory, lambda c, step, state: c.save_checkpoint(step, {**state, "args": given}))


@answered(NotLoadable, value="state['p']", limit="weights_only", remedy="weights_only=False")
def state_with_a_path(scene: Scene) -> None:
    save(scene.directory, lambda c, step, state: c.save_checkpoint(step, {**state, "p": pathlib.Path("/x")}))


@answered(NotLoadable, value="state['model']", limit="weights_only", remedy="state_dict()")
def state_with_a_model(scene: Scene) -> None:
    model = network()
    save(scene.directory, lambda c, step, state: c.save_checkpoint(step, {"model": model}))


@answered(TypeError, value="state_dict is a Sequential", limit="a dict", remedy="state_dict()")
def model_as_state(scene: Scene) -> None:
    model = network()
    save(scene.directory, lambda c, step, state: c.save_checkpoint(step, model))


@answered(TypeError, value="rank_state is a list", limit="a dict", remedy="such as {")
def rank_state_list(scene: Scene) -> None:
    save(scene.directory, lambda c, step, state: c.save_checkpoint(step, state, rank_state=[1, 2]))


@answered(
    ConfigError, value="verify is 'alway'", limit="'never', 'resume' or 'always'", remedy="did you mean 'always'?"
)
def verify_typo(scene: Scene) -> None:
    save(scene.directory, verify="alway")


@answered(ConfigError, value="'latest'", limit="a strategy or None", remedy="KeepLatestStepStrategy(3, checkpoint_dir)")
def strategy_as_text(scene: Scene) -> None:
    save(scene.directory, deletion_strategy="latest")


@answered(ConfigError, value="'latest'", limit="a strategy or None", remedy="KeepLatestStepStrategy(3, checkpoint_dir)")
def strategy_as_text_and_saves_to_disk(scene: Scene) -> None:
    def call(c: DdpCheckpointer, step: int, state: dict[str, Any]) -> object:
        return c.save_checkpoint(step, state, storage_type=DISK)

    save(scene.directory, call, deletion_strategy="latest")


@answered(ConfigError, value="the class KeepLatestStepStrategy", limit="a strategy or None", remedy="(...)")
def strategy_class(scene: Scene) -> None:
    save(scene.directory, deletion_strategy=KeepLatestStepStrategy)


@answered(ConfigError, value="max_to_keep is '/", limit="a whole number", remedy="KeepLatestStepStrategy(max_to_keep, ")
def strategy_reversed(scene: Scene) -> None:
    save(scene.directory, deletion_strategy=KeepLatestStepStrategy(scene.directory, 2))


@answered(ConfigError, value="max_to_keep is 0", limit="1 or more", remedy="give")
def strategy_that_keeps_nothing(scene: Scene) -> None:
    save(scene.directory, deletion_strategy=KeepLatestStepStrategy(0, scene.directory))


@answered(WARNING, value="/elsewhere", limit="is for", remedy="give it")
def strategy_of_another_directory(scene: Scene) -> None:
    save(scene.directory, deletion_strategy=KeepLatestStepStrategy(2, "/elsewhere"))


@answered(ConfigError, value="overlap is True", limit="torch optimizers", remedy="give overlap=optimizer")
def overlap_true(scene: Scene) -> None:
    save(scene.directory, overlap=True)


@answered(WARNING, value="without loading step 2", limit="a new history begins", remedy="Call load_checkpoint()")
def second_run_that_does_not_load(scene: Scene) -> None:
    save(scene.directory)
    save(scene.directory, load=False)


@answered(BadCheckpoint, value="/checkpoint-77", limit="No such file or directory", remedy="fastckpt ls")
def resume_path_that_is_not_there(scene: Scene) -> None:
    save(scene.directory)
    with DdpCheckpointer(scene.directory) as checkpointer:
        checkpointer.load_checkpoint(resume_path=f"{scene.directory}/checkpoint-77")


@answered(TypeError, value="resume_path is 100", limit="a path", remedy="checkpoint-100")
def resume_path_as_number(scene: Scene) -> None:
    with DdpCheckpointer(scene.directory) as checkpointer:
        checkpointer.load_checkpoint(100)


@answered(BadCheckpoint, value="argparse.Namespace", limit="weights_only", remedy="weights_only=False")
def resume_path_with_arguments(scene: Scene) -> None:
    file = pathlib.Path(scene.directory).with_name("stock.pt")
    torch.save({"weights": torch.ones(3), "args": argparse.Namespace(lr=1)}, file)
    with DdpCheckpointer(scene.directory) as checkpointer:
        checkpointer.load_checkpoint(file)


@answered(WORKS)
def metric_as_tensor(scene: Scene) -> None:
    save(scene.directory, lambda c, step, state: c.save_checkpoint(step, state, metrics={"loss": torch.tensor(1.0)}))


@answered(ConfigError, value="'low'", limit="a number", remedy="give")
def metric_as_text(scene: Scene) -> None:
    save(scene.directory, lambda c, step, state: c.save_checkpoint(step, state, metrics={"loss": "low"}))


@answered(ConfigError, value="metrics is 0.5", limit="numbers by name", remedy="such as {'loss': 0.5}")
def metrics_as_number(scene: Scene) -> None:
    save(scene.directory, lambda c, step, state: c.save_checkpoint(step, state, metrics=0.5))


@answered(TypeError, value="timeout is '60'", limit="seconds, 0 or more", remedy="give")
def timeout_as_text(scene: Scene) -> None:
    save(scene.directory, lambda c, step, state: c.wait_latest_checkpoint("60"))


@answered(FastckptError, value="the checkpointer is closed", limit="after close()", remedy="make another")
def save_after_close(scene: Scene) -> None:
    save(scene.directory).save_checkpoint(9, {"weights": torch.zeros(1)})


@answered(FastckptError, value="2 ranks", limit="load_checkpoint", remedy="torch.distributed.init_process_group")
def ddp_without_group(scene: Scene) -> None:
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        scene.environment.setenv(name, str(value))
    save(scene.directory)


@answered(ArenaTooSmall, value="MiB", limit="free", remedy="--fast-no-memory")
def state_too_large(scene: Scene) -> None:
    scene.mount(4)
    save(scene.directory, lambda c, step, state: c.save_checkpoint(step, {"weights": torch.zeros(4 << 20)}))
