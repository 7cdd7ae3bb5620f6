"""Mistakes with ActivationOffload: where to, how much, and around what it is entered."""

import contextlib
import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from fastckpt.errors import FastckptError, OffloadError
from fastckpt.offload import ActivationOffload
from tests.e2e.mistakes.table import WARNING, WORKS, Row, Scene, answered, mistakes

CALLED: list[Callable[[], object]] = []
"""What a forked process calls: it inherits it."""


def offload_to(scene: Scene) -> ActivationOffload:
    Path(scene.directory).mkdir(exist_ok=True)
    return ActivationOffload(Path(scene.directory), budget="4MiB")


def loss_of(around: Any) -> torch.Tensor:
    weight = torch.ones(1 << 19, requires_grad=True)
    with around:
        return weight.exp().tanh().exp().sum()


def called() -> None:
    torch.set_num_threads(1)  # as in workers of a DataLoader: threads of OpenMP do not survive a fork
    CALLED[0]()


def in_a_fork(act: Callable[[], object]) -> None:
    """Call it in a forked process; raises what it raises."""
    CALLED[:] = [act]
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        pool.submit(called).result(120)


def forked_within_the_block(around: ActivationOffload) -> None:
    """As a DataLoader does that is made there: what the fork saves itself is left alone."""
    with around:
        in_a_fork(lambda: loss_of(contextlib.nullcontext()).backward())


mistakes(
    lambda scene, act: act(offload_to(scene)),
    entered_in_a_fork=Row(
        lambda around: in_a_fork(lambda: loss_of(around)),
        FastckptError,
        "of process  | none of its threads | make one in each process",
    ),
    backward_in_a_fork=Row(
        lambda around: in_a_fork(loss_of(around).backward),
        OffloadError,
        "that process  | none of its threads | in the process of its forward",
    ),
    forked_within_the_block=Row(forked_within_the_block, WORKS),
)


@answered(WARNING, "is in memory | frees none | choose an SSD")
def scratch_in_memory(scene: Scene) -> None:
    ActivationOffload(scene.mount(16 << 20))


@answered(FastckptError, "entered in two threads | one forward alone | make one for each thread")
def entered_in_two_threads(scene: Scene) -> None:
    around, is_in, may_leave = offload_to(scene), threading.Event(), threading.Event()

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


@answered(WARNING, "4 ActivationOffloads | one forward each | Make one before the loop")
def made_in_each_step(scene: Scene) -> None:
    for _ in range(6):
        loss_of(offload_to(scene)).backward()
