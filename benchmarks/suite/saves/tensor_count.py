"""A later save to memory beside the copy of its bytes, by number of tensors: what is paid for each of them."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks.harness.benchmark import Benchmark, Contender, Figure, Goal, Values
from benchmarks.harness.page import brief
from benchmarks.harness.results import Run
from benchmarks.harness.turn import Turn, record, values_of
from benchmarks.suite._states import many_parameters

COUNTS = (450, 2000, 10000)
BEFORE = 6
"""Saves before the measured ones: each slot is used, and overlap has begun."""
SAVES = 15
GOAL = Goal("at most", 1.0)
"""Milliseconds for 1,000 tensors."""
PLAIN, OVERLAPPED, THREE_LINES = "DdpCheckpointer", "DdpCheckpointer, overlap=optimizer", "Checkpointer.step"

Work = Callable[[], object]


def saves(turn: Turn, way: str) -> None:
    """The worker: saves of more and more tensors, a step of the optimizer before each."""
    copying = _timed_copies()
    for count in COUNTS:
        model = many_parameters(count // 4)  # each has two moments and a step counter in AdamW
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with _saving(turn, f"checkpoints-{count}", way, model, optimizer) as save_of:
            for step in range(1, 1 + BEFORE + (5 if turn.is_quick else SAVES)):
                optimizer.step()
                seconds, processor = _times(save_of(step))
                if step > BEFORE:
                    values = (seconds - copying[0]) / count, (processor - copying[1]) / count
                    record(**dict(zip(_names(count), values, strict=True)))


@contextmanager
def _saving(
    turn: Turn, name: str, way: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[Callable[[int], Work]]:
    """Gives the save of a step, as a call of what is measured."""
    from fastckpt import Checkpointer, DdpCheckpointer, StorageType

    def save_of(step: int) -> Work:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        return partial(ddp.save_checkpoint, step, states, storage_type=StorageType.MEMORY)

    folder = turn.folder / name
    if way == THREE_LINES:
        every = {"memory": 1, "storage": 1_000_000}
        with Checkpointer(folder, model=model, optimizer=optimizer, every=every) as checkpointer:
            checkpointer.resume()
            yield lambda step: partial(checkpointer.step, step)
    else:
        with DdpCheckpointer(folder, overlap=optimizer if way == OVERLAPPED else None) as ddp:
            yield save_of


def _timed_copies() -> list[float]:
    """The seconds of the last copy of a snapshot's bytes before a save returns, and those of the processor in it."""
    from fastckpt._core.transfer.host_copy import HostCopy

    fill, took = HostCopy.fill, [0.0, 0.0]

    def timed(copier: HostCopy, copies: Any) -> None:
        took[:] = _times(lambda: fill(copier, copies))

    HostCopy.fill = timed  # type: ignore[method-assign]
    return took


def _times(work: Work) -> tuple[float, float]:
    """Seconds that a call takes, and those of the processor in this thread."""
    start, own = time.perf_counter(), time.thread_time()
    work()
    return time.perf_counter() - start, time.thread_time() - own


def _names(count: int) -> tuple[str, str]:
    return f"seconds_{count}", f"processor_{count}"


def _measure(way: str, turn: Turn) -> Values:
    records = turn.job(saves, way, options=["--fast-max-stalls=0"])
    return {name: values_of(records, name) for count in COUNTS for name in _names(count)}


def _figures(way: str) -> list[Figure]:
    unit, scale = "ms per 1,000 tensors", 1e6
    return [
        Figure(f"{way}, {count:,} tensors{of}", f"{way}.{name}", goal=GOAL, unit=unit, scale=scale)
        for count in COUNTS
        for of, name in zip(("", ", processor time"), _names(count), strict=True)
    ]


def table(runs: Sequence[Run]) -> str:
    """A row for each way, with the newest run's time and processor time for each number of tensors."""
    run = runs[-1]
    lines = [
        f"| ms, processor ms; goal: {GOAL} | {' | '.join(f'{count:,} tensors' for count in COUNTS)} |",
        "| --- " * (len(COUNTS) + 1) + "|",
    ]
    for way in WAYS:
        figures = iter(_figures(way))
        cells = [", ".join(_cell(figure.values(run)) for figure in pair) for pair in zip(figures, figures, strict=True)]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(values: Sequence[float]) -> str:
    """A median; bold if the goal is met."""
    text = brief(values)
    return f"**{text}**" if values and GOAL.is_met(statistics.median(values)) else text


WAYS = (PLAIN, OVERLAPPED, THREE_LINES)
BENCHMARK = Benchmark(
    name="tensor_count",
    question="What does a later save to memory cost beyond the copy of its bytes, for each 1,000 tensors?",
    work="AdamW with parameters of 64 numbers, one worker. Checkpointer.step also makes the state dicts.",
    contenders=[Contender(way, partial(_measure, way)) for way in WAYS],
    figures=[figure for way in WAYS for figure in _figures(way)],
    gigabytes=0,
    table=table,
)
