"""Ways to go through a loader: one iteration per batch, for ever, or ahead of the training."""

import gc
import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fastckpt.data import ResumableDataLoader
from fastckpt.errors import ConfigError
from tests.unit.data.jobs import Endless, Indexed


def loader_of(state: dict[str, Any] | None = None, **options: Any) -> ResumableDataLoader:
    loader = ResumableDataLoader(list(range(16)), 4, shuffle=True, num_replicas=1, rank=0, **options)
    if state:
        loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize("saved", [1, 4, 5])
def test_a_loop_with_a_new_iterator_per_batch_resumes_at_an_epochs_end(saved: int) -> None:
    """Also if the job is killed once more, before it has shown how it goes through the loader."""

    def take(loader: ResumableDataLoader, steps: int) -> list[list[int]]:
        return [next(iter(loader)).tolist() for _ in range(steps)]

    whole = take(loader_of(), 12)
    first = loader_of()
    batches = take(first, saved)
    second = loader_of(first.state_dict())
    batches += take(second, 1)
    batches += take(loader_of(second.state_dict()), 11 - saved)
    assert batches == whole


@pytest.mark.parametrize(("dataset", "collects"), [(Indexed(8), False), (Endless(8), True)])
def test_itertools_cycle_resumes_at_an_epochs_end_with_a_warning(
    dataset: Any, collects: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the cycle has become an old object before the first batch."""
    loader = ResumableDataLoader(dataset, 4, num_replicas=1, rank=0)
    batches = itertools.cycle(loader)
    if collects:
        gc.collect()
    next(batches), next(batches)
    state = loader.state_dict()
    assert not caplog.text
    next(batches)
    assert caplog.text.count("itertools.cycle keeps the batches of the first epoch") == 1
    again = ResumableDataLoader(dataset, 4, num_replicas=1, rank=0)
    again.load_state_dict(state)
    assert len([next(itertools.cycle(again)) for _ in range(2)]) == 2 and again.epoch == 1


def fetching(loader: ResumableDataLoader) -> Iterator[Any]:
    """One ahead, as apex and timm do while the device computes."""
    batches = iter(loader)
    ready = next(batches, None)
    while ready is not None:
        present, ready = ready, next(batches, None)
        yield present


def threaded(loader: ResumableDataLoader) -> Iterator[Any]:
    """Up to three ahead, by a thread."""
    ready: queue.Queue[Any] = queue.Queue(3)
    threading.Thread(target=lambda: [ready.put(batch) for batch in [*loader, None]], daemon=True).start()
    while (batch := ready.get()) is not None:
        yield batch


def two_epochs(loader: ResumableDataLoader) -> Iterator[Any]:
    """Asks for no batch after the last of an epoch, and goes on to the next while none is used."""
    yield from [batch for _ in range(2) for _, batch in zip(range(len(loader)), loader, strict=False)]


@pytest.mark.parametrize("saved", [2, 4])
@pytest.mark.parametrize("ahead", [fetching, threaded, two_epochs])
def test_batches_fetched_ahead_are_not_lost_by_a_resume(ahead: Callable[..., Iterator[Any]], saved: int) -> None:
    def train(loader: ResumableDataLoader, steps: int) -> tuple[list[list[int]], dict[str, Any]]:
        used: list[list[int]] = []
        while len(used) < steps:
            for batch in ahead(loader):
                used.append(batch.tolist())
                loader.used()
                if len(used) == steps:
                    break
        return used, loader.state_dict()

    loader = loader_of()
    whole = [batch.tolist() for _ in range(3) for batch in loader][:10]
    before, state = train(loader_of(ahead=True), saved)
    after, _ = train(loader_of(state, ahead=True), 10 - saved)
    assert before + after == whole


def test_wrong_counts_of_used_batches_are_refused() -> None:
    loader = loader_of(ahead=True)
    with pytest.raises(ConfigError, match=r"used\(1\), but 0 batches"):
        loader.used()
    batches = iter(loader)
    next(batches), next(batches)
    with pytest.raises(ConfigError, match=r"used\(3\), but 2 batches"):
        loader.used(3)
    loader.used(2)
    assert loader.state_dict()["cursor"] == 8 and not loader.ended
    list(batches)
    loader.used(2)
    assert loader.ended
    forgetful = loader_of(ahead=True)
    list(forgetful)
    with pytest.raises(ConfigError, match=r"used\(\) never called"):
        forgetful.state_dict()
    with pytest.raises(ConfigError, match="give ahead=True"):
        loader_of().used()
