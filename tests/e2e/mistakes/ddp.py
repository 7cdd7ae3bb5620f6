"""Mistakes with DdpCheckpointer: what is saved, under which step, and how."""

import argparse
import dataclasses
import pathlib

import numpy as np
import torch

from fastckpt.ddp import DdpCheckpointer, KeepLatestStepStrategy, StorageType
from fastckpt.errors import ArenaTooSmall, BadCheckpoint, ConfigError, FastckptError, NotLoadable, StepError
from tests.e2e.mistakes.table import TWO_RANKS, WARNING, WORKS, Row, Scene, answered, mistakes, network, save

DISK = StorageType.DISK


@dataclasses.dataclass
class Settings:
    rate: float = 1.0


mistakes(
    lambda scene, given: save(scene.directory, lambda c, n, state: c.save_checkpoint(*given(n, state))),
    storage_type_as_path=Row(
        lambda n, state: (n, state, DISK),
        TypeError,
        "path is StorageType.DISK | a path | storage_type=StorageType.DISK",
    ),
    step_and_state_swapped=Row(
        lambda n, state: (state, n), TypeError, "step is a dict | a whole number | save_checkpoint(step, state_dict"
    ),
    step_as_text=Row(lambda n, state: (str(n), state), TypeError, "step is '0' | a whole number | give int(step)"),
    step_below_zero=Row(lambda n, state: (-1, state), StepError, "step -1 | whole numbers from 0 | give"),
    steps_backwards=Row(
        lambda n, state: (10 - n, state), StepError, "step 9 comes after step 10 | must not go back | resume_path="
    ),
    state_with_a_model=Row(
        lambda n, _: (n, {"model": network()}), NotLoadable, "state['model'] | weights_only | state_dict()"
    ),
    model_as_state=Row(lambda n, _: (n, network()), TypeError, "state_dict is a Sequential | a dict | state_dict()"),
)
UNSAFE = (NotLoadable, "state['it'] | weights_only | weights_only=False")
mistakes(
    lambda scene, it: save(scene.directory, lambda c, n, state: c.save_checkpoint(n, state | {"it": it})),
    state_with_a_numpy_scalar=Row(np.float64(1.5), *UNSAFE),
    state_with_a_dataclass=Row(Settings(), *UNSAFE),
)
mistakes(
    lambda scene, options: save(scene.directory, lambda c, n, state: c.save_checkpoint(n, state, **options)),
    storage_type_as_text=Row(
        {"storage_type": "disk"}, ConfigError, "storage_type is 'disk' | MEMORY or | did you mean StorageType.DISK?"
    ),
    rank_state_list=Row({"rank_state": [1, 2]}, TypeError, "rank_state is a list | a dict | such as {"),
    metric_as_tensor=Row({"metrics": {"loss": torch.tensor(1.0)}}, WORKS),
    metric_as_text=Row({"metrics": {"loss": "low"}}, ConfigError, "'low' | a number | give"),
    metrics_as_number=Row({"metrics": 0.5}, ConfigError, "metrics is 0.5 | numbers by name | such as {'loss': 0.5}"),
)
mistakes(
    lambda scene, options: save(scene.directory, **options),
    verify_typo=Row(
        {"verify": "alway"}, ConfigError, "verify is 'alway' | 'never', 'resume' or 'always' | did you mean 'always'?"
    ),
    strategy_as_text=Row(
        {"deletion_strategy": "latest"},
        ConfigError,
        "'latest' | a strategy or None | KeepLatestStepStrategy(3, checkpoint_dir)",
    ),
    strategy_class=Row(
        {"deletion_strategy": KeepLatestStepStrategy},
        ConfigError,
        "the class KeepLatestStepStrategy | a strategy or None | (...)",
    ),
    strategy_of_another_directory=Row(
        {"deletion_strategy": KeepLatestStepStrategy(2, "/elsewhere")}, WARNING, "/elsewhere | is for | give it"
    ),
    overlap_true=Row({"overlap": True}, ConfigError, "overlap is True | torch optimizers | give overlap=optimizer"),
)
mistakes(
    lambda scene, arguments: save(scene.directory, deletion_strategy=KeepLatestStepStrategy(*arguments)),
    strategy_reversed=Row(
        ("/a", 2), ConfigError, "max_to_keep is '/ | a whole number | KeepLatestStepStrategy(max_to_keep, "
    ),
    strategy_that_keeps_nothing=Row((0, "/a"), ConfigError, "max_to_keep is 0 | 1 or more | give"),
)


@answered(AttributeError, "state['fn'] | cannot be saved | leave it out")
def state_with_a_lambda(scene: Scene) -> None:
    save(scene.directory, lambda c, n, state: c.save_checkpoint(n, state | {"fn": lambda x: x}))


@answered(WARNING, "without loading step 2 | a new history begins | Call load_checkpoint()")
def second_run_that_does_not_load(scene: Scene) -> None:
    save(scene.directory)
    save(scene.directory, load=False)


@answered(BadCheckpoint, "/checkpoint-77 | No such file or directory | fastckpt ls")
def resume_path_that_is_not_there(scene: Scene) -> None:
    save(scene.directory)
    with DdpCheckpointer(scene.directory) as checkpointer:
        checkpointer.load_checkpoint(resume_path=f"{scene.directory}/checkpoint-77")


@answered(TypeError, "resume_path is 100 | a path | checkpoint-100")
def resume_path_as_number(scene: Scene) -> None:
    with DdpCheckpointer(scene.directory) as checkpointer:
        checkpointer.load_checkpoint(100)


@answered(BadCheckpoint, "argparse.Namespace | weights_only | weights_only=False")
def resume_path_with_arguments(scene: Scene) -> None:
    file = pathlib.Path(scene.directory).with_name("stock.pt")
    torch.save({"weights": torch.ones(3), "args": argparse.Namespace(lr=1)}, file)
    with DdpCheckpointer(scene.directory) as checkpointer:
        checkpointer.load_checkpoint(file)


@answered(TypeError, "timeout is '60' | seconds, 0 or more | give")
def timeout_as_text(scene: Scene) -> None:
    save(scene.directory, lambda c, *_: c.wait_latest_checkpoint("60"))


@answered(FastckptError, "the checkpointer is closed | after close() | make another")
def save_after_close(scene: Scene) -> None:
    save(scene.directory).save_checkpoint(9, {"weights": torch.zeros(1)})


@answered(FastckptError, "2 ranks | load_checkpoint | torch.distributed.init_process_group")
def ddp_without_group(scene: Scene) -> None:
    scene.has(**TWO_RANKS)
    save(scene.directory)


@answered(ArenaTooSmall, "MiB | free | --fast-no-memory")
def state_too_large(scene: Scene) -> None:
    scene.mount(4)
    save(scene.directory, lambda c, step, state: c.save_checkpoint(step, {"weights": torch.zeros(4 << 20)}))
