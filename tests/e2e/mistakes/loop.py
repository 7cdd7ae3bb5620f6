"""Mistakes with the three lines: fastckpt.Checkpointer, resume() and step(); and with the loader of the data."""

import os
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from fastckpt import Checkpointer
from fastckpt.data import ResumableDataLoader
from fastckpt.errors import ConfigError, FastckptError, StepError
from tests.e2e.mistakes.table import (
    WARNING,
    Noise,
    Row,
    Scene,
    answered,
    group_of_one,
    mistakes,
    network,
    parts,
    sharded_by_zero,
    train,
)
from tests.support import launchers

mistakes(
    lambda scene, options: train(scene.directory, options=options),
    every_zero=Row({"every": 0}, ConfigError, "every is 0 steps | 1 to | give"),
    every_mapping_typo=Row(
        {"every": {"memory": 2, "disk": 4}}, ConfigError, "'disk' | 'memory' and 'storage' | such as {'storage': 100}"
    ),
    overhead_in_percent=Row({"overhead": 3.5}, ConfigError, "overhead is 3.5 | below 1 | 0.035"),
)
LOADER = DataLoader(Noise(), batch_size=8, shuffle=True)
mistakes(
    lambda scene, given: train(scene.directory, **given),
    plain_loader=Row({"data": LOADER}, ConfigError, "data=DataLoader | no state_dict | Use ResumableDataLoader"),
    step_without_resume=Row({"resume": False}, FastckptError, "step 1 | before the first step | call resume()"),
    step_that_never_counts=Row(
        {"number": lambda _: 1}, WARNING, "step 1 was given | each step once | count on from resume()"
    ),
    step_anew_in_each_epoch=Row(
        {"number": lambda step: step % 4, "steps": 6},
        StepError,
        "step 0 comes after step 3 | through all epochs | count on from resume()",
    ),
)


mistakes(
    lambda scene, make: make(scene),
    keyword_typo=Row(
        lambda scene: Checkpointer(scene.directory, model=network(), optimiser=1),
        TypeError,
        "'optimiser' | deletion_strategy | did you mean 'optimizer'?",
    ),
    parts_by_position=Row(
        lambda scene: Checkpointer(scene.directory, network(), None),  # type: ignore[misc]
        TypeError,
        "3 were given | takes checkpoint_dir by position | give the others by name",
    ),
    loader_typo=Row(
        lambda scene: ResumableDataLoader(Noise(), batchsize=8),
        TypeError,
        "'batchsize' | num_workers | did you mean 'batch_size'?",
    ),
    state_of_something_else=Row(
        lambda scene: ResumableDataLoader(Noise(), batch_size=8).load_state_dict(parts()["optimizer"].state_dict()),
        ConfigError,
        "'param_groups' | a ResumableDataLoader | give what state_dict()",
    ),
)


@answered(WARNING, "used up | begins with the batch after it | docs/guides/data.md")
def a_look_at_the_first_batch(scene: Scene) -> None:
    loader = ResumableDataLoader(Noise(), batch_size=8)
    next(iter(loader))
    for _ in loader:
        pass


@answered(ConfigError, "ZeroRedundancyOptimizer | only one of them is given all | fully_shard")
def optimizer_sharded_by_zero(scene: Scene) -> None:
    with group_of_one():
        model = network()
        Checkpointer(scene.directory, model=model, optimizer=sharded_by_zero(model))


@answered(WARNING, "closed without resume() | nothing was loaded, nothing saved | call resume()")
def block_without_resume(scene: Scene) -> None:
    with Checkpointer(scene.directory, **parts()):
        pass


UNCLOSED = """
import sys
from fastckpt import Checkpointer
from tests.e2e.mistakes.table import parts
checkpointer = Checkpointer(sys.argv[1], **parts(), every=100)
for step in range(checkpointer.resume() + 1, 4):
    checkpointer.step(step)
"""


@answered(WARNING, "step 3 | close() | with Checkpointer(...) as checkpointer:")
def end_without_close(scene: Scene) -> None:
    script, output = (Path(scene.directory).with_name(name) for name in ("unclosed.py", "output"))
    script.write_text(UNCLOSED)
    with output.open("wb") as file:
        assert launchers.start([str(script), scene.directory], os.environ, file.fileno()).wait(120) == 0
    scene.printed.append(output.read_text())


@answered(ConfigError, "no scheduler | it has model | Give the parts that were saved")
def scheduler_added(scene: Scene) -> None:
    train(scene.directory)
    given = parts()
    train(scene.directory, **given | {"scheduler": torch.optim.lr_scheduler.StepLR(given["optimizer"], 1)})


@answered(FastckptError, "2 ranks | resume | torch.distributed.init_process_group")
def ranks_without_group(scene: Scene) -> None:
    scene.has(RANK=0, LOCAL_RANK=0, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2)
    train(scene.directory)
