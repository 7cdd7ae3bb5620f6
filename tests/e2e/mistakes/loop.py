"""Mistakes with the three lines: fastckpt.Checkpointer, resume() and step()."""

import subprocess
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from fastckpt import Checkpointer
from fastckpt.data import ResumableDataLoader
from fastckpt.errors import BadCheckpoint, ConfigError, FastckptError, StepError
from tests.e2e.mistakes.table import (
    WARNING,
    WORKS,
    Noise,
    Scene,
    answered,
    group_of_one,
    network,
    parts,
    sharded_by_zero,
    train,
)

ROOT = Path(__file__).parents[3]


@answered(ConfigError, value="every is 0 steps", limit="1 to", remedy="give")
def every_zero(scene: Scene) -> None:
    train(scene.directory, options={"every": 0})


@answered(ConfigError, value="every is '10 minutes'", limit="a whole number of steps, or a timedelta", remedy="give")
def every_text(scene: Scene) -> None:
    train(scene.directory, options={"every": "10 minutes"})


@answered(ConfigError, value="every is 2.5", limit="a whole number of steps", remedy="give")
def every_float(scene: Scene) -> None:
    train(scene.directory, options={"every": 2.5})


@answered(ConfigError, value="'disk'", limit="'memory' and 'storage'", remedy="such as {'storage': 100}")
def every_mapping_typo(scene: Scene) -> None:
    train(scene.directory, options={"every": {"memory": 2, "disk": 4}})


@answered(TypeError, value="'optimiser'", limit="deletion_strategy", remedy="did you mean 'optimizer'?")
def keyword_typo(scene: Scene) -> None:
    Checkpointer(scene.directory, model=network(), optimiser=1)


@answered(TypeError, value="3 were given", limit="takes checkpoint_dir by position", remedy="give the others by name")
def parts_by_position(scene: Scene) -> None:
    Checkpointer(scene.directory, network(), None)  # type: ignore[misc]


@answered(ConfigError, value="overhead is 3.5", limit="below 1", remedy="0.035")
def overhead_in_percent(scene: Scene) -> None:
    train(scene.directory, options={"overhead": 3.5})


@answered(ConfigError, value="data=DataLoader", limit="no state_dict", remedy="Use ResumableDataLoader")
def plain_loader(scene: Scene) -> None:
    train(scene.directory, data=DataLoader(Noise(), batch_size=8, shuffle=True))


@answered(ConfigError, value="model is a function", limit="torch.nn.Module", remedy="give the module")
def model_function(scene: Scene) -> None:
    Checkpointer(scene.directory, model=network)


@answered(ConfigError, value="model is an OrderedDict", limit="torch.nn.Module", remedy="give the module")
def model_state(scene: Scene) -> None:
    Checkpointer(scene.directory, model=network().state_dict())


@answered(TypeError, value="'model'", limit="model, optimizer", remedy="give model=")
def model_missing(scene: Scene) -> None:
    Checkpointer(scene.directory, optimizer=torch.optim.AdamW(network().parameters()))


@answered(ConfigError, value="optimizer is the class AdamW", limit="state_dict", remedy="AdamW(...)")
def optimizer_class(scene: Scene) -> None:
    train(scene.directory, optimizer=torch.optim.AdamW)


@answered(ConfigError, value="ZeroRedundancyOptimizer", limit="only one of them is given all", remedy="fully_shard")
def optimizer_sharded_by_zero(scene: Scene) -> None:
    with group_of_one():
        Checkpointer(scene.directory, model=(model := network()), optimizer=sharded_by_zero(model))


@answered(ConfigError, value="overlap is an AdamW", limit="True or False", remedy="the optimizers are known")
def overlap_optimizer(scene: Scene) -> None:
    given = parts()
    Checkpointer(scene.directory, **given, overlap=given["optimizer"])


@answered(ConfigError, value="others is a list", limit="by name", remedy="such as {'scaler': scaler}")
def others_list(scene: Scene) -> None:
    Checkpointer(scene.directory, **parts(), others=[torch.amp.GradScaler("cpu")])


@answered(ConfigError, value="scheduler is None", limit="state_dict and load_state_dict", remedy="leave it out")
def scheduler_none(scene: Scene) -> None:
    train(scene.directory, scheduler=None)


@answered(FastckptError, value="step 1", limit="before the first step", remedy="call resume()")
def step_without_resume(scene: Scene) -> None:
    train(scene.directory, resume=False)


@answered(BadCheckpoint, value="checkpoint-5", limit="No such file", remedy="fastckpt ls")
def resume_of_a_step_that_is_not_there(scene: Scene) -> None:
    with Checkpointer(scene.directory, **parts()) as checkpointer:
        checkpointer.resume(step=5)


@answered(TypeError, value="'step'", limit="step, metrics", remedy="give step=")
def step_without_number(scene: Scene) -> None:
    given = parts()
    with Checkpointer(scene.directory, **given) as checkpointer:
        checkpointer.resume()
        checkpointer.step()


@answered(TypeError, value="step is '50'", limit="a whole number", remedy="give int(step)")
def resume_of_text(scene: Scene) -> None:
    with Checkpointer(scene.directory, **parts()) as checkpointer:
        checkpointer.resume(step="50")


@answered(TypeError, value="step is 1.0", limit="a whole number", remedy="give int(step)")
def step_float(scene: Scene) -> None:
    train(scene.directory, float)


@answered(WARNING, value="step 1 was given", limit="each step once", remedy="count on from resume()")
def step_that_never_counts(scene: Scene) -> None:
    train(scene.directory, lambda _: 1)


@answered(StepError, value="step 0 comes after step 3", limit="through all epochs", remedy="count on from resume()")
def step_anew_in_each_epoch(scene: Scene) -> None:
    train(scene.directory, lambda step: step % 4, steps=6)


@answered(FastckptError, value="the checkpointer is closed", limit="after close()", remedy="make another")
def step_after_close(scene: Scene) -> None:
    train(scene.directory).step(99)


@answered(WARNING, value="closed without resume()", limit="nothing was loaded, nothing saved", remedy="call resume()")
def block_without_resume(scene: Scene) -> None:
    with Checkpointer(scene.directory, **parts()):
        pass


UNCLOSED = """
from fastckpt import Checkpointer
from tests.e2e.mistakes.table import parts
checkpointer = Checkpointer({directory!r}, **parts(), every=100)
for step in range(checkpointer.resume() + 1, 4):
    checkpointer.step(step)
"""


@answered(WARNING, value="step 3", limit="close()", remedy="with Checkpointer(...) as checkpointer:")
def end_without_close(scene: Scene) -> None:
    command = [sys.executable, "-c", UNCLOSED.format(directory=scene.directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    scene.printed.append(done.stderr)


@answered(ConfigError, value="model", limit="size mismatch", remedy="give the model that was saved")
def model_grew(scene: Scene) -> None:
    train(scene.directory)
    train(scene.directory, model=network(width=6))


@answered(ConfigError, value="SGD", limit="AdamW", remedy="give")
def other_optimizer(scene: Scene) -> None:
    train(scene.directory)
    model = network()
    train(scene.directory, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


@answered(ConfigError, value="optimizer", limit="parameter groups", remedy="give the optimizer that was saved")
def more_groups(scene: Scene) -> None:
    train(scene.directory)
    model = network()
    groups = [{"params": [each]} for each in model.parameters()]
    train(scene.directory, model=model, optimizer=torch.optim.AdamW(groups))


@answered(ConfigError, value="sample 24 of 64", limit="here that epoch has 50", remedy="Give the data set")
def other_data(scene: Scene) -> None:
    train(scene.directory)
    train(scene.directory, data=ResumableDataLoader(Noise(50), batch_size=8, shuffle=True))


@answered(ConfigError, value="no scheduler", limit="it has model", remedy="Give the parts that were saved")
def scheduler_added(scene: Scene) -> None:
    train(scene.directory)
    given = parts()
    train(scene.directory, **given, scheduler=torch.optim.lr_scheduler.StepLR(given["optimizer"], 1))


@answered(WARNING, value="the checkpoint has data", limit="which no part takes", remedy="give data=")
def data_dropped(scene: Scene) -> None:
    train(scene.directory)
    given = parts()
    with Checkpointer(scene.directory, model=given["model"], optimizer=given["optimizer"]) as checkpointer:
        checkpointer.resume()


@answered(WORKS)
def directory_as_path(scene: Scene) -> None:
    train(Path(scene.directory))


@answered(FastckptError, value="2 ranks", limit="resume", remedy="torch.distributed.init_process_group")
def ranks_without_group(scene: Scene) -> None:
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        scene.environment.setenv(name, str(value))
    train(scene.directory)
