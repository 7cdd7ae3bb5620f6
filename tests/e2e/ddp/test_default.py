"""Saves without a storage type: all reach memory, and storage as many as its speed allows."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest
import torch

from fastckpt._core.saver.stats import SaverStats
from fastckpt.ddp import DdpCheckpointer, StorageType
from tests.e2e.ddp.conftest import Ranks, on_storage, state, until

DISK, MEMORY = StorageType.DISK, StorageType.MEMORY
SAVES = 100
SIZE = 50_000
"""Bytes of a state: at `PACE` seconds per save 20 MB/s are saved, and storage takes a twentieth."""
PACE, RATE = 0.0025, "1"
LARGE = 3 * SIZE
"""Of one that takes over half a second, in which several others are saved also on a busy machine."""


@pytest.fixture
def slow(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> DdpCheckpointer:
    monkeypatch.setenv("FASTCKPT_PERSIST_MBPS", RATE)
    (one,) = ranks.start()
    return one


@contextmanager
def refused_writes(directory: Path) -> Iterator[None]:
    """The directory's private part is a file for a while: all that is written there fails."""
    private, away = directory / ".fastckpt", directory / "away"
    private.rename(away)
    private.touch()
    yield
    private.unlink()
    away.rename(private)


def tally(ranks: Ranks) -> SaverStats:
    assert ranks.saver is not None
    (found,) = ranks.saver.report()
    return found


def test_with_storage_at_a_twentieth_of_the_save_rate_memory_skips_none(slow, ranks, directory):
    for step in range(1, SAVES + 1):
        start = time.monotonic()
        assert slow.save_checkpoint(step, state(step, SIZE // 4))
        time.sleep(max(0.0, PACE - (time.monotonic() - start)))
    assert slow.wait_latest_checkpoint(60) == SAVES
    assert ranks.resume() == [(SAVES, "memory")]
    counts, steps = tally(ranks), on_storage(directory)
    assert counts.persisted == len(steps) > SAVES / 50, "as one was durable, the next was persisted"
    assert counts.overtaken + counts.persisted == SAVES
    assert not (counts.asked or counts.skips or counts.lacking)


def test_the_newest_default_save_is_persisted_though_memory_saves_are_newer(slow, ranks, directory):
    slow.save_checkpoint(1, state(1, LARGE))
    slow.save_checkpoint(2, state(2, LARGE))
    for step in (3, 4, 5, 6):
        assert slow.save_checkpoint(step, state(step, LARGE), storage_type=MEMORY)
    assert slow.wait_latest_checkpoint(60) == 6
    assert on_storage(directory) == [1, 6] and tally(ranks).overtaken == 1


def test_a_save_with_disk_path_or_metrics_becomes_durable_and_memory_saves_are_skipped(
    ranks, directory, tmp_path, monkeypatch
):
    monkeypatch.setenv("FASTCKPT_PERSIST_MBPS", "0.3")  # two seconds for each, in which others are saved
    (slow,) = ranks.start()
    mine = tmp_path / "mine.pt"
    slow.save_checkpoint(1, state(1, LARGE), metrics={"loss": 1.0})
    slow.save_checkpoint(2, state(2, LARGE), mine)
    skipped = [not slow.save_checkpoint(step, state(step, LARGE), storage_type=MEMORY) for step in (3, 4, 5)]
    assert sum(skipped) == tally(ranks).skips.total() > 0
    slow.wait_latest_checkpoint(60)
    assert on_storage(directory) == [1, 2] and tally(ranks).overtaken == 0
    assert torch.load(mine)["step"] == 2


def test_while_storage_refuses_writes_the_newest_save_waits_and_then_is_persisted(ranks, directory):
    (one,) = ranks.start()
    one.save_checkpoint(1, state(1))
    assert one.wait_latest_checkpoint(60) == 1
    with refused_writes(directory):
        for step in range(2, 12):
            assert one.save_checkpoint(step, state(step))
        until(lambda: tally(ranks).failures > 0, "a failure")
        for step in range(12, 20):
            assert one.save_checkpoint(step, state(step))
    until(lambda: on_storage(directory)[-1] == 19, "the newest is durable")
    assert one.wait_latest_checkpoint(60) == 19 and not tally(ranks).asked


def test_a_save_requested_during_a_successful_retry_is_persisted(ranks, directory, monkeypatch):
    begun, go_on = Event(), Event()

    def held(descriptor: int, sync: Callable[[int], None] = os.fsync) -> None:
        begun.set()
        assert go_on.wait(60)
        sync(descriptor)

    (one,) = ranks.start()
    one.save_checkpoint(1, state(1))
    one.wait_latest_checkpoint(60)
    with refused_writes(directory):
        assert one.save_checkpoint(2, state(2), storage_type=DISK)
        until(lambda: tally(ranks).failures > 0, "a failure")
        monkeypatch.setattr(os, "fsync", held)
        monkeypatch.setattr(os, "fdatasync", held)
    assert begun.wait(60)
    assert one.save_checkpoint(3, state(3), storage_type=DISK)
    go_on.set()
    assert one.wait_latest_checkpoint(60) == 3


def test_default_saves_pending_at_the_end_of_the_job_become_durable_without_a_flush_too(ranks, directory, monkeypatch):
    monkeypatch.setenv("FASTCKPT_PERSIST_MBPS", RATE)
    monkeypatch.setenv("FASTCKPT_FLUSH", "0")
    (one,) = ranks.start()
    for step in (1, 2, 3):
        one.save_checkpoint(step, state(step, SIZE))
    ranks.end()
    assert on_storage(directory) == [1, 3]
