"""The first save of a job, beside a copy into warm shared memory; and what later steps pay for it."""

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness.benchmark import Benchmark, Contender, Figure, Goal, Values
from benchmarks.harness.turn import Turn, record, values_of
from benchmarks.suite._limits import seconds, warm_copies
from benchmarks.suite._processes import agent, processor_seconds, rest
from benchmarks.suite._states import gpt2, storages

BEFORE, AFTER = 12, 8
"""Steps before the first save, and after it."""


def _training(gigabytes: float) -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A GPT-2 whose steps are those of AdamW alone: the most that a step does to memory."""
    torch.set_num_threads(1)
    model = gpt2(gigabytes)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model, optimizer, optimizer.step


def _measure(state: Any, save: Callable[[int], object], step: Callable[[], None], before: int) -> None:
    """Steps, the first save, the steps after it, and copies of the same tensors."""
    saver = agent()
    begin, used = time.perf_counter(), processor_seconds(saver)
    early = [seconds(step) for _ in range(before)]
    reserved = processor_seconds(saver) - used
    waited = time.perf_counter() - begin
    first = seconds(lambda: save(before + 1))
    used = processor_seconds(saver)
    late = [seconds(step) for _ in range(AFTER)]
    later = processor_seconds(saver) - used
    rest(saver)
    alone = [seconds(step) for _ in range(AFTER)]
    copies = warm_copies(sources := storages(state()), 3)
    gigabytes = sum(source.numel() for source in sources) / 1e9
    record(first=first, copy=copies, early=early, late=late, alone=alone, waited=waited)
    record(agent_before=reserved / gigabytes, agent_after=later / gigabytes)


def plain(turn: Turn, before: int, is_prepared: bool) -> None:
    """The worker: a DdpCheckpointer, prepared or not, and its first save after so many steps."""
    from fastckpt import DdpCheckpointer, StorageType

    model, optimizer, step = _training(turn.gigabytes)
    if not before:
        step()  # the optimizer has a state

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}

    with DdpCheckpointer(turn.folder / "checkpoints") as checkpointer:
        checkpointer.load_checkpoint()
        if is_prepared:
            checkpointer.prepare(state(), optimizer)
        _measure(
            state, lambda i: checkpointer.save_checkpoint(i, state(), storage_type=StorageType.MEMORY), step, before
        )


def three_lines(turn: Turn) -> None:
    """The worker: a Checkpointer, whose first save is at the step after the others."""
    from fastckpt import Checkpointer

    model, optimizer, step = _training(turn.gigabytes)
    checkpointer = Checkpointer(
        turn.folder / "checkpoints",
        model=model,
        optimizer=optimizer,
        every={"memory": BEFORE + 1, "storage": 10**5 * (BEFORE + 1)},
    )
    checkpointer.resume()
    done = iter(range(1, 10**6))

    def counted() -> None:
        step()
        checkpointer.step(next(done))

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    _measure(state, lambda i: checkpointer.step(next(done)), counted, BEFORE)
    checkpointer.close()


def relaunched(turn: Turn, is_first: bool) -> None:
    """The worker: one job leaves a checkpoint on storage; the next one loads it, and saves after some steps."""
    from fastckpt import DdpCheckpointer, StorageType

    model, optimizer, step = _training(turn.gigabytes)
    with DdpCheckpointer(turn.folder / "checkpoints") as checkpointer:
        if is_first:
            step()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}
            checkpointer.save_checkpoint(0, state, storage_type=StorageType.DISK)
            return
        loaded = checkpointer.load_checkpoint()
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        del loaded
        _measure(
            lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0},
            lambda i: checkpointer.save_checkpoint(
                i,
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": i},
                storage_type=StorageType.MEMORY,
            ),
            step,
            BEFORE,
        )


def measure(function: Callable[..., None], *arguments: object, turn: Turn) -> Values:
    """Return the measurements of the worker of one job."""
    if function is relaunched:
        turn.job(relaunched, True)
        arguments = (False,)
    records = turn.job(function, *arguments)
    keys = ("first", "copy", "early", "late", "alone", "waited", "agent_before", "agent_after")
    return {key: values_of(records, key) for key in keys}


AS_GUIDES_SAY = ("prepared", "Checkpointer")
"""Ways that meet the goal easily: a quick look is for the others."""


def contender(name: str, function: Callable[..., None], *arguments: object) -> Contender:
    """A way in which a job comes to its first save."""
    return Contender(name, lambda turn: measure(function, *arguments, turn=turn), quick=name not in AS_GUIDES_SAY)


WAYS = ("at once", "after steps", "prepared", "Checkpointer", "relaunch")

BENCHMARK = Benchmark(
    name="first_save",
    question="What does the first save of a job cost, compared with a copy into warm memory?",
    work=f"GPT-2 with AdamW, one worker. At once: no step before the save. All others: {BEFORE} steps before it. "
    "Prepared: after `prepare()`. Checkpointer: three lines. Relaunch: after a load from storage.",
    contenders=[
        contender("at once", plain, 0, False),
        contender("after steps", plain, BEFORE, False),
        contender("prepared", plain, BEFORE, True),
        contender("Checkpointer", three_lines),
        contender("relaunch", relaunched),
    ],
    figures=[
        *(Figure(f"first save : warm copy, {way}", f"{way}.first", f"{way}.copy", Goal("at most", 4)) for way in WAYS),
        *(
            Figure(f"a step after the save : alone, {way}", f"{way}.late", f"{way}.alone", is_detail=True)
            for way in WAYS
        ),
        *(
            Figure(
                f"processor time of the agent {when} the save, {way}", f"{way}.agent_{key}", unit="s/GB", is_detail=True
            )
            for way in WAYS
            for when, key in (("before", "before"), ("in the steps after", "after"))
        ),
    ],
    rounds=1,
    gigabytes=0.5,
)
