"""Mistakes with DdpCheckpointer: what is saved, under which step, and how."""

import torch

from fastckpt.ddp import DdpCheckpointer, KeepLatestStepStrategy, StorageType
from fastckpt.errors import ArenaTooSmall, BadCheckpoint, ConfigError, FastckptError, NotLoadable, StepError
from tests.e2e.mistakes.table import WARNING, Row, Scene, answered, mistakes, network, save

DISK = StorageType.DISK


def load(scene: Scene, path: object) -> None:
    save(scene.directory)
    with DdpCheckpointer(scene.directory) as checkpointer:
        checkpointer.load_checkpoint(path)


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
    step_below_zero=Row(lambda n, state: (-1, state), StepError, "step -1 | whole numbers from 0 | give"),
    steps_backwards=Row(
        lambda n, state: (10 - n, state), StepError, "step 9 comes after step 10 | must not go back | resume_path="
    ),
    state_with_a_model=Row(
        lambda n, _: (n, {"model": network()}), NotLoadable, "state['model'] | weights_only | state_dict()"
    ),
)
mistakes(
    lambda scene, options: save(scene.directory, lambda c, n, state: c.save_checkpoint(n, state, **options)),
    storage_type_as_text=Row(
        {"storage_type": "disk"}, ConfigError, "storage_type is 'disk' | MEMORY or | did you mean StorageType.DISK?"
    ),
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
    strategy_of_another_directory=Row(
        {"deletion_strategy": KeepLatestStepStrategy(2, "/elsewhere")}, WARNING, "/elsewhere | is for | give it"
    ),
    overlap_true=Row({"overlap": True}, ConfigError, "overlap is True | torch optimizers | give overlap=optimizer"),
)
mistakes(
    lambda scene, make: make(scene),
    strategy_that_keeps_nothing=Row(
        lambda scene: KeepLatestStepStrategy(0, scene.directory), ConfigError, "max_to_keep is 0 | 1 or more | give"
    ),
    resume_path_that_is_not_there=Row(
        lambda scene: load(scene, f"{scene.directory}/checkpoint-77"),
        BadCheckpoint,
        "/checkpoint-77 | No such file or directory | fastckpt ls",
    ),
    resume_path_as_number=Row(
        lambda scene: load(scene, 100), TypeError, "resume_path is 100 | a path | checkpoint-100"
    ),
    save_after_close=Row(
        lambda scene: save(scene.directory).save_checkpoint(9, {"weights": torch.zeros(1)}),
        FastckptError,
        "the checkpointer is closed | after close() | make another",
    ),
)


@answered(ArenaTooSmall, "MiB | free | --fast-no-memory")
def state_too_large(scene: Scene) -> None:
    scene.mount(4)
    save(scene.directory, lambda c, step, state: c.save_checkpoint(step, {"weights": torch.zeros(4 << 20)}))
