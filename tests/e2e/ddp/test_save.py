"""save_checkpoint: its effects, results and refusals."""

import datetime
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch

from fastckpt._core import metrics
from fastckpt._core.memory import slots
from fastckpt._core.saver import server
from fastckpt._core.saver.stats import SaverStats
from fastckpt.ddp import DdpCheckpointer, StorageType
from fastckpt.errors import AgentLost, ConfigError, FastckptError, NotLoadable
from tests.e2e.ddp.conftest import Ranks, on_storage, state
from tests.support.waits import until

DISK, MEMORY = StorageType.DISK, StorageType.MEMORY


def in_memory(member: DdpCheckpointer) -> list[int]:
    """Steps of the whole checkpoints in the arena, as its files tell."""
    found = member._writer.link.arena.glob("slot-*")
    return sorted(save.step for slot in found if (save := slots.read(slot).committed))


@pytest.fixture
def one(ranks: Ranks) -> DdpCheckpointer:
    return ranks.start()[0]


class TestPromotion:
    def test_a_disk_save_of_a_step_in_memory_copies_nothing(self, one, tmp_path):
        assert one.save_checkpoint(4, state(4), storage_type=MEMORY).reason == ""
        before = [metrics.counts[name] for name in ("snapshot.fill", "snapshot.skeleton")]
        persisted = metrics.counts["persist.manifest"]
        for storage_type in (MEMORY, DISK, DISK):
            result = one.save_checkpoint(4, state(5), tmp_path / "mine.pt", storage_type=storage_type)
            assert result.saved and result.reason == "memory already holds this step"
            assert one.wait_latest_checkpoint(60) == (4 if storage_type is DISK else None)
        assert [metrics.counts[name] for name in ("snapshot.fill", "snapshot.skeleton")] == before
        assert metrics.counts["persist.manifest"] == persisted + 1
        assert torch.load(tmp_path / "mine.pt", weights_only=True)["step"] == 4
        assert one.load_checkpoint()["step"] == 4


class TestSteps:
    def test_an_invalid_step_or_storage_type_is_refused_and_the_next_is_saved(self, one):
        for step, kind, error in ((2**70, MEMORY, FastckptError), (None, MEMORY, TypeError), (1, 7, ConfigError)):
            with pytest.raises(error):
                one.save_checkpoint(step, state(0), storage_type=kind)
        assert in_memory(one) == []
        assert one.save_checkpoint(2, state(1), storage_type=MEMORY)

    def test_zero_large_numbers_and_whole_numbers_of_other_types_are_accepted_as_steps(self, one):
        for step in (0, torch.tensor(3), np.int64(4), 2**62):
            assert one.save_checkpoint(step, state(3), storage_type=DISK).step == int(step)  # type: ignore[arg-type]
            assert one.wait_latest_checkpoint(60) == int(step)
            one.load_checkpoint()
            assert one.loaded_step == int(step)


class TestSkippedSaves:
    def test_a_save_without_a_free_slot_is_skipped_on_all_ranks_with_a_reason(self, ranks):
        first, second = ranks.start(2)
        before = metrics.counts["skipped_saves"]
        results = [first.save_checkpoint(step, state(step), storage_type=MEMORY) for step in (1, 2, 3, 4)]
        assert [result.saved for result in results] == [True, True, True, False]
        assert [result.skipped for result in results] == [0, 0, 0, 1]
        assert "waits for local rank 1" in results[3].reason and metrics.counts["skipped_saves"] == before + 1
        assert not first.save_checkpoint(4, state(4), storage_type=DISK)
        before = metrics.counts["skipped_saves"]
        late = [second.save_checkpoint(step, state(step), storage_type=MEMORY) for step in (1, 2, 3, 4)]
        assert [result.saved for result in late] == [True, True, True, False]
        assert late[3].reason == results[3].reason
        assert metrics.counts["skipped_saves"] == before + 1
        assert in_memory(first) == [1, 2, 3]
        for member in (first, second):
            assert member.save_checkpoint(6, state(6), storage_type=MEMORY)
        assert [loaded["step"] for loaded in ranks.load()] == [6, 6]


class TestClosedCheckpointer:
    def test_a_lost_launcher_is_reported_and_does_not_end_training(self, ranks, monkeypatch):
        monkeypatch.setattr(server, "WRITERS_TIMEOUT", 0.1)
        (one,) = ranks.start()
        one.save_checkpoint(1, state(1), storage_type=MEMORY)
        assert ranks.saver is not None
        ranks.saver.close()
        for step in (2, 3):
            result = one.save_checkpoint(step, state(step), storage_type=MEMORY)
            assert not result.saved and "gone" in result.reason
        assert result.skipped == 2
        with pytest.raises(AgentLost, match="gone"):
            one.wait_latest_checkpoint(5)

    def test_a_directory_has_one_checkpointer_at_a_time_each_with_a_history_of_its_own(self, directory):
        for value, step in ((1, 5), (2, 5), (3, 3)):
            with DdpCheckpointer(directory) as one:
                with pytest.raises(FastckptError, match="close that one first"):
                    DdpCheckpointer(directory)
                assert one.save_checkpoint(step, state(0), storage_type=MEMORY)
                assert one.save_checkpoint(step + 1, state(value), storage_type=MEMORY)
                assert one.load_checkpoint()["weights"][0] == value and one.loaded_step == step + 1


def test_a_step_saved_to_several_paths_is_at_each_of_them_and_overwritten_by_the_next(
    one, directory, tmp_path, monkeypatch
):
    """Relative ones, too; stock torch reads them."""
    monkeypatch.chdir(tmp_path)
    for names in (("", "latest.pt", "best.pt", "best.pt"), ("deep/late.pt",)):
        for name in names:
            assert one.save_checkpoint(1, state(1), name, DISK)
        assert one.wait_latest_checkpoint(60) == 1
    assert one.save_checkpoint(2, state(2), "latest.pt", DISK) and one.wait_latest_checkpoint(60) == 2
    places = {directory / "checkpoint-1/model.pt": 1, Path("latest.pt"): 2, Path("best.pt"): 1, Path("deep/late.pt"): 1}
    for path, step in places.items():
        assert torch.load(path, weights_only=True)["step"] == step, path
    assert os.listdir("deep") == ["late.pt"]


DATE = datetime.date(2026, 1, 1)


class TestNotLoadable:
    def test_a_value_that_would_not_load_is_refused_with_its_key_unless_the_directory_is_trusted(self, ranks):
        (one,) = ranks.start()
        one.save_checkpoint(1, state(1), storage_type=MEMORY)
        bad = state(2) | {"blob": bytes(8), "extra": {"deep": [0, DATE]}}
        for step in (2, 3):
            with pytest.raises(NotLoadable, match=r"state\['extra'\]\['deep'\]\[1\]"):
                one.save_checkpoint(step, bad, storage_type=MEMORY)
            with pytest.raises(NotLoadable, match=r"\['state'\]\['own'\]"):
                one.save_checkpoint(step, state(2), rank_state={"own": DATE}, storage_type=MEMORY)
        assert in_memory(one) == [1]
        for step in (4, 5):
            assert one.save_checkpoint(step, state(step) | {"blob": bytes(8)}, storage_type=MEMORY)
            with pytest.raises(NotLoadable):
                one.save_checkpoint(step + 1, bad, storage_type=MEMORY)
        assert one.load_checkpoint()["step"] == 5
        ranks.end()
        (one,) = ranks.start(weights_only=False)
        assert one.save_checkpoint(6, bad, storage_type=MEMORY)
        assert one.load_checkpoint()["extra"]["deep"][1] == DATE

    @pytest.mark.parametrize("culprit", [threading.Lock(), lambda: 0])
    def test_a_value_that_cannot_be_pickled_leaves_the_next_save_possible(self, one, directory, culprit):
        one.save_checkpoint(1, state(1), storage_type=DISK)
        for extra, path in ((culprit, "['extra']"), ([{"deep": culprit}], "['extra'][0]['deep']")):
            with pytest.raises((TypeError, AttributeError, pickle.PicklingError)) as error:
                one.save_checkpoint(2, state(2) | {"extra": extra}, storage_type=DISK)
            assert error.value.__notes__[0].startswith(f"fastckpt: state{path}, a {type(culprit).__module__}.")
        assert in_memory(one) == [1]
        assert one.save_checkpoint(2, state(2), storage_type=DISK)
        assert one.wait_latest_checkpoint(60) == 2 and on_storage(directory) == [1, 2]


# --- saves without a storage type: all reach memory, and storage as many as its speed allows

SAVES = 100
SIZE = 50_000
"""Bytes of a state: at `PACE` seconds per save 20 MB/s are saved, and storage takes a twentieth."""
PACE, RATE = 0.0025, "1"
LARGE = 3 * SIZE
"""Of one that takes over half a second, in which several others are saved also on a busy machine."""


@pytest.fixture
def slow(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> DdpCheckpointer:
    monkeypatch.setenv("FASTCKPT_PERSIST_MBPS", RATE)
    monkeypatch.setenv("FASTCKPT_FLUSH", "0")
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


def test_the_newest_default_save_is_persisted_though_memory_saves_are_newer_or_the_job_ends_without_a_flush(
    slow, ranks, directory
):
    slow.save_checkpoint(1, state(1, LARGE))
    slow.save_checkpoint(2, state(2, LARGE))
    for step in (3, 4, 5, 6):
        assert slow.save_checkpoint(step, state(step, LARGE), storage_type=MEMORY)
    assert slow.wait_latest_checkpoint(60) == 6
    assert on_storage(directory) == [1, 6] and tally(ranks).overtaken == 1
    for step in (7, 8, 9):
        slow.save_checkpoint(step, state(step, LARGE))
    ranks.end()
    assert on_storage(directory) == [1, 6, 7, 9]


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
