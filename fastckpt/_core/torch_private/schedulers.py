"""Private names of torch's learning rate schedulers."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any


def schedulers_within(scheduler: Any) -> Iterator[Any]:
    """Yield a scheduler and its inner ones: as SequentialLR and ChainedScheduler have."""
    yield scheduler
    for each in getattr(scheduler, "_schedulers", ()):
        yield from schedulers_within(each)


def closed_form(scheduler: Any) -> list[Any]:
    """The learning rates that follow from its arguments and step alone; empty if it does not know them."""
    if milestones := getattr(scheduler, "_milestones", None):  # of SequentialLR: the one of its turn
        scheduler = scheduler._schedulers[bisect_right(milestones, scheduler.last_epoch)]
    return list(getattr(scheduler, "_get_closed_form_lr", list)())


def set_last_rates(scheduler: Any, rates: Sequence[Any]) -> None:
    """Have ``get_last_lr`` give these."""
    for each in schedulers_within(scheduler):
        if hasattr(each, "_last_lr"):
            each._last_lr = list(rates)
