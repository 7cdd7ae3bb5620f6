"""Mistakes with ActivationOffload: where to, how much, and around what it is entered."""

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from fastckpt.errors import ConfigError, FastckptError, OffloadError
from fastckpt.offload import ActivationOffload
from tests.e2e.mistakes.table import WARNING, WORKS, Scene, answered, network

SIZE = 1 << 19


def disk(scene: Scene) -> Path:
    """A directory as it should be."""
    Path(scene.directory).mkdir(exist_ok=True)
    return Path(scene.directory)


def loss_of(around: Any) -> torch.Tensor:
    """A loss whose graph holds tensors that are offloaded."""
    weight = torch.ones(SIZE, requires_grad=True)
    with around:
        return weight.exp().tanh().exp().sum()


# --- where to


@answered(ConfigError, value="/checkpoints'", limit="does not exist", remedy="make it on a local SSD")
def scratch_that_is_not_there(scene: Scene) -> None:
    ActivationOffload(scene.directory)


@answered(ConfigError, value="/file'", limit="is not a directory", remedy="make it on a local SSD")
def scratch_that_is_a_file(scene: Scene) -> None:
    file = disk(scene) / "file"
    file.touch()
    ActivationOffload(file)


@answered(ConfigError, value="'/proc'", limit="no file can be made", remedy="that this user may write to")
def scratch_that_cannot_be_written(scene: Scene) -> None:
    ActivationOffload("/proc")


@answered(ConfigError, value="'s3://bucket/scratch'", limit="a local disk", remedy="give an existing directory")
def scratch_that_is_a_url(scene: Scene) -> None:
    ActivationOffload("s3://bucket/scratch")


@answered(ConfigError, value="directory is ''", limit="an existing directory", remedy="such as '/nvme/scratch'")
def scratch_without_a_name(scene: Scene) -> None:
    ActivationOffload(os.environ.get("NO_SUCH_SCRATCH", ""))


@answered(ConfigError, value="directory is None", limit="an existing directory", remedy="such as '/nvme/scratch'")
def scratch_none(scene: Scene) -> None:
    ActivationOffload(None)


@answered(TypeError, value="'directory'", limit="budget", remedy="give directory=")
def scratch_left_out(scene: Scene) -> None:
    ActivationOffload(budget="4GiB")


@answered(WARNING, value="is in memory", limit="frees none", remedy="choose an SSD")
def scratch_in_memory(scene: Scene) -> None:
    ActivationOffload(scene.mount(16 << 20))


@answered(WORKS)
def scratch_as_path(scene: Scene) -> None:
    loss_of(ActivationOffload(disk(scene), budget="64MiB")).backward()


# --- how much


@answered(ConfigError, value="budget is '4G'", limit="a text such as '4GiB'", remedy="give bytes")
def budget_of_a_wrong_unit(scene: Scene) -> None:
    ActivationOffload(disk(scene), budget="4G")


@answered(ConfigError, value="budget is '-4GiB'", limit="4 MiB or more", remedy="give bytes")
def budget_text_below_zero(scene: Scene) -> None:
    ActivationOffload(disk(scene), budget="-4GiB")


@answered(ConfigError, value="budget is -4 bytes", limit="less than 4.0 MiB", remedy="give bytes")
def budget_below_zero(scene: Scene) -> None:
    ActivationOffload(disk(scene), budget=-4)


@answered(ConfigError, value="budget is 4 bytes", limit="less than 4.0 MiB", remedy="'4GiB'")
def budget_in_gib(scene: Scene) -> None:
    ActivationOffload(disk(scene), budget=4)


@answered(ConfigError, value="budget is 0.5", limit="4 MiB or more", remedy="give bytes")
def budget_as_a_part(scene: Scene) -> None:
    ActivationOffload(disk(scene), budget=0.5)


@answered(ConfigError, value="budget is None", limit="4 MiB or more", remedy="'auto'")
def budget_none(scene: Scene) -> None:
    ActivationOffload(disk(scene), budget=None)


@answered(ConfigError, value="budget is 'Auto'", limit="4 MiB or more", remedy="did you mean 'auto'?")
def budget_auto_typo(scene: Scene) -> None:
    ActivationOffload(disk(scene), budget="Auto")


@answered(TypeError, value="2 were given", limit="takes directory by position", remedy="give the others by name")
def budget_by_position(scene: Scene) -> None:
    ActivationOffload(disk(scene), "4GiB")  # type: ignore[misc]


# --- other arguments


@answered(ConfigError, value="consistency is 'chek'", limit="'check' or 'copy'", remedy="did you mean 'check'?")
def consistency_typo(scene: Scene) -> None:
    ActivationOffload(disk(scene), consistency="chek")


@answered(ConfigError, value="consistency is True", limit="'check' or 'copy'", remedy="give")
def consistency_true(scene: Scene) -> None:
    ActivationOffload(disk(scene), consistency=True)


@answered(TypeError, value="half is a dtype", limit="True or False", remedy="half=True")
def half_as_dtype(scene: Scene) -> None:
    ActivationOffload(disk(scene), half=torch.float16)


@answered(TypeError, value="return_memory is 'no'", limit="True or False", remedy="return_memory=True")
def return_memory_as_text(scene: Scene) -> None:
    ActivationOffload(disk(scene), return_memory="no")


@answered(TypeError, value="'buget'", limit="return_memory", remedy="did you mean 'budget'?")
def offload_keyword_typo(scene: Scene) -> None:
    ActivationOffload(disk(scene), buget="4GiB")


# --- around what


@answered(WORKS)
def entered_within_itself(scene: Scene) -> None:
    around = ActivationOffload(disk(scene), budget="4MiB")
    with around:
        loss_of(around).backward()


@answered(WORKS)
def entered_around_the_backward(scene: Scene) -> None:
    around = ActivationOffload(disk(scene), budget="4MiB")
    for _ in range(2):
        with around:
            loss_of(contextlib.nullcontext()).backward()


@answered(WORKS)
def entered_around_nothing_that_is_saved(scene: Scene) -> None:
    around = ActivationOffload(disk(scene), budget="4MiB")
    for _ in range(2):
        with around, torch.no_grad():
            network()(torch.ones(2, 8))
    str(around.report())


def from_two_threads(around: ActivationOffload) -> None:
    """Enter it in another thread while that is in it; raises what this thread gets."""
    is_in, may_leave = threading.Event(), threading.Event()

    def forward() -> None:
        with around:
            is_in.set()
            may_leave.wait(60)

    other = threading.Thread(target=forward)
    other.start()
    try:
        assert is_in.wait(60)
        with around:
            pass
    finally:
        may_leave.set()
        other.join()


@answered(FastckptError, value="entered in two threads", limit="one forward alone", remedy="make one for each thread")
def entered_in_two_threads(scene: Scene) -> None:
    from_two_threads(ActivationOffload(disk(scene), budget="4MiB"))


@answered(WORKS)
def entered_in_threads_one_after_another(scene: Scene) -> None:
    around = ActivationOffload(disk(scene), budget="4MiB")
    for _ in range(2):
        thread = threading.Thread(target=lambda: loss_of(around).backward())
        thread.start()
        thread.join()
    assert around.report().forwards == 2


CALLED: list[Callable[[], object]] = []
"""What a forked process calls: it inherits it."""


def called() -> None:
    torch.set_num_threads(1)  # as in workers of a DataLoader: threads of OpenMP do not survive a fork
    CALLED[0]()


def in_a_fork(act: Callable[[], object]) -> None:
    """Call it in a forked process; raises what it raises."""
    CALLED[:] = [act]
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        pool.submit(called).result(120)


@answered(FastckptError, value="of process ", limit="none of its threads", remedy="make one in each process")
def entered_in_a_fork(scene: Scene) -> None:
    around = ActivationOffload(disk(scene), budget="4MiB")
    in_a_fork(lambda: loss_of(around))


@answered(OffloadError, value="that process ", limit="none of its threads", remedy="in the process of its forward")
def backward_in_a_fork(scene: Scene) -> None:
    loss = loss_of(ActivationOffload(disk(scene), budget="4MiB"))
    in_a_fork(loss.backward)


@answered(WORKS)
def forked_within_the_block(scene: Scene) -> None:
    """As a DataLoader does that is made there: what the fork saves itself is left alone."""
    around = ActivationOffload(disk(scene), budget="4MiB")
    with around:
        in_a_fork(lambda: loss_of(contextlib.nullcontext()).backward())


@answered(WARNING, value="4 ActivationOffloads", limit="one forward each", remedy="Make one before the loop")
def made_in_each_step(scene: Scene) -> None:
    for _ in range(6):
        loss_of(ActivationOffload(disk(scene), budget="4MiB")).backward()


@answered(WORKS)
def several_models_with_one_each(scene: Scene) -> None:
    many = [ActivationOffload(disk(scene), budget="4MiB") for _ in range(6)]
    for around in many:
        loss_of(around).backward()


@answered(RuntimeError, value="[torch.FloatTensor [524288]]", limit="inplace operation", remedy='consistency="copy"')
def changed_in_place_before_the_backward(scene: Scene) -> None:
    weight = torch.ones(SIZE, requires_grad=True)
    with ActivationOffload(disk(scene), budget="4MiB"):
        value = weight.exp()
        loss = value.sum()
    value.add_(1)
    loss.backward()
