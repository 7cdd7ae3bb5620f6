"""The saver: what it keeps when writers die, send invalid messages or lag, and when storage refuses."""

import asyncio
import errno
import gc
import itertools
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from fastckpt._core import metrics
from fastckpt._core.config import Settings
from fastckpt._core.ipc import messages as m
from fastckpt._core.ipc.channel import Channel, bind, pack
from fastckpt._core.memory import slots
from fastckpt._core.memory.arena import Arena, arena_path, arena_paths
from fastckpt._core.memory.census import census
from fastckpt._core.memory.presence import Presence
from fastckpt._core.memory.processes import Process
from fastckpt._core.memory.records import write_record
from fastckpt._core.memory.telemetry import TelemetryBlock, telemetry_name, unlink
from fastckpt._core.saver import coordinator as coordinator
from fastckpt._core.saver.persistence import persister
from fastckpt._core.saver.server import Saver
from fastckpt._core.saver.worker_connection import _watch
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt.ddp import StorageType
from fastckpt.errors import AgentLost, ArenaInUse, FastckptError, PersistError, PlaceInUse, SaverError
from fastckpt_run.events import summary
from tests.e2e.ddp.conftest import Ranks, state, until
from tests.support.live_folders import remove_live

DISK, MEMORY = StorageType.DISK, StorageType.MEMORY
ROOT = Path(__file__).parents[4]
OTHER = 77
"""A user who runs no job."""


def on_storage(directory: Path) -> list[int]:
    return sorted(stored.id.step for stored in CheckpointDirectory(directory).checkpoints())


def newest_slot(ranks: Ranks) -> Path:
    found = {slots.read(slot).committed: slot for slot in ranks.members[0]._writer.link.arena.glob("slot-*")}
    return found[max(id for id in found if id)]


def left_in_memory(ranks: Ranks, directory: Path) -> Path:
    """Step 1 on storage; step 2 in the arena of an owner that is gone."""
    (one,) = ranks.start()
    one.save_checkpoint(1, state(1), storage_type=DISK)
    one.wait_latest_checkpoint(60)
    one.save_checkpoint(2, state(2), storage_type=MEMORY)
    path = one._writer.link.arena
    kept = path.with_name("kept")
    shutil.copytree(path, kept)
    ranks.end()
    shutil.rmtree(directory / "checkpoint-2")
    kept.rename(path)
    return path


class TestRecordsCountNotMessages:
    def test_a_commit_without_a_message_is_flushed_at_the_end(self, ranks: Ranks, directory: Path, monkeypatch):
        (one,) = ranks.start()
        one.save_checkpoint(1, state(1), storage_type=MEMORY)
        monkeypatch.setattr(one._writer.link, "committed", lambda *_, **__: None)
        one.save_checkpoint(2, state(2), storage_type=MEMORY)
        ranks.end()
        assert on_storage(directory) == [2]

    def test_a_commit_without_a_message_is_flushed_after_a_worker_death(
        self, ranks: Ranks, directory: Path, monkeypatch
    ):
        (one,) = ranks.start()
        monkeypatch.setattr(one._writer.link, "committed", lambda *_, **__: None)
        one.save_checkpoint(2, state(2), storage_type=MEMORY)
        ranks.workers_die()
        (one,) = ranks.start_workers()
        assert one.load_checkpoint()["step"] == 2

    def test_a_disk_save_with_one_missing_message_is_flushed_without_a_wait(self, ranks: Ranks):
        """Rank 1 dies at its notice of a save to disk: it is flushed, and nothing waits for it ever after."""
        first, second = ranks.start(2)
        first.save_checkpoint(1, state(1), storage_type=DISK)
        second._writer.link.committed = lambda *_, **__: None  # type: ignore[method-assign]
        second.save_checkpoint(1, state(1), storage_type=DISK)
        ranks.workers_die()
        first, _ = ranks.start_workers(2)
        assert first.wait_latest_checkpoint(20) == 1

    def test_a_save_that_one_writer_has_not_finished_is_dropped_after_its_death(self, ranks: Ranks, directory: Path):
        first, second = ranks.start(2)
        for member in (first, second):
            member.save_checkpoint(1, state(1), storage_type=MEMORY)
        first.save_checkpoint(2, state(2), storage_type=DISK)
        ranks.workers_die()
        ranks.start_workers(2)
        assert [loaded["step"] for loaded in ranks.load()] == [1, 1]
        for member in ranks.members:
            assert member.save_checkpoint(2, state(2), storage_type=DISK)
        assert ranks.members[0].wait_latest_checkpoint(60) == 2

    def test_records_that_cannot_be_removed_are_reported_and_the_workers_restarted(
        self, ranks: Ranks, monkeypatch, said
    ):
        """The flush of the newest whole save, and the next workers, do without any unlink."""
        first, second = ranks.start(2)
        for member in (first, second):
            member.save_checkpoint(1, state(1), storage_type=MEMORY)
        first.save_checkpoint(2, state(2), storage_type=DISK)
        found = [(slots.read(slot), slot) for slot in first._writer.link.arena.glob("slot-*")]
        (half,) = (slot for records, slot in found if records.begin and not records.committed)
        write_record(half.parent / "writer-1-1", replace(Process.current(), ticks=1).to_record())
        with monkeypatch.context() as broken:

            def refuse(path: os.PathLike[str], **_: object) -> None:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

            for name in ("unlink", "remove"):
                broken.setattr(os, name, refuse)
            for member in ranks.members:
                member._writer.close()
            ranks.saver.breakpoint()
            assert "the signature of a writer" in said.text
            assert slots.read(half).begin is None
        ranks.start_workers(2)
        assert [loaded["step"] for loaded in ranks.load()] == [1, 1]
        for member in ranks.members:
            assert member.save_checkpoint(2, state(2), storage_type=DISK)
        assert ranks.members[0].wait_latest_checkpoint(60) == 2

    def test_one_step_of_two_generations_of_workers_is_not_joined(self, ranks: Ranks):
        """Rank 0 had saved step 2; after the restart rank 1 saves step 2: that is no checkpoint."""
        first, second = ranks.start(2)
        for member in (first, second):
            member.save_checkpoint(1, state(1), storage_type=MEMORY)
        first.save_checkpoint(2, state(2), storage_type=MEMORY)
        ranks.workers_die()
        ranks.start_workers(2)
        ranks.load()
        ranks.members[1].save_checkpoint(2, state(2), storage_type=MEMORY)
        assert [loaded["step"] for loaded in ranks.load()] == [1, 1]


class TestFailingStorage:
    @pytest.fixture(autouse=True)
    def soon(self, monkeypatch):
        monkeypatch.setattr(persister, "FIRST_PAUSE", 0.01)

    def refusing(self, monkeypatch, times: int) -> list[int]:
        publish, tried = CheckpointDirectory.publish, []

        def sometimes(self: CheckpointDirectory, request: PublishRequest) -> object:
            tried.append(request.id.step)
            if len(tried) <= times:
                raise PersistError("no space left for it")
            return publish(self, request)

        monkeypatch.setattr(CheckpointDirectory, "publish", sometimes)
        return tried

    def test_a_persist_that_storage_refuses_is_retried(self, ranks: Ranks, directory: Path, monkeypatch):
        before = metrics.counts["persist_failures"]
        tried = self.refusing(monkeypatch, 3)
        (one,) = ranks.start()
        assert one.save_checkpoint(1, state(1), storage_type=DISK)
        assert one.wait_latest_checkpoint(60) == 1
        assert tried == [1] * 4 and on_storage(directory) == [1]
        assert metrics.counts["persist_failures"] == before + 3
        assert one.save_checkpoint(2, state(2), storage_type=MEMORY).trouble == ""

    def test_saves_continue_while_storage_refuses_and_report_it(self, ranks: Ranks, monkeypatch):
        self.refusing(monkeypatch, 10**6)
        (one,) = ranks.start()
        assert one.save_checkpoint(1, state(1), storage_type=DISK)
        with pytest.raises(PersistError, match=r"step 1 of history 1 could not be persisted .*no space left for it"):
            one.wait_latest_checkpoint(60)
        results = [one.save_checkpoint(step, state(step), storage_type=MEMORY) for step in (2, 3, 4, 5)]
        assert all(result.saved for result in results)
        assert "no space left for it" in results[-1].trouble
        monkeypatch.undo()

    def test_a_later_successful_persist_ends_the_reported_trouble(self, ranks: Ranks, directory: Path, monkeypatch):
        self.refusing(monkeypatch, persister.ATTEMPTS)
        (one,) = ranks.start()
        one.save_checkpoint(1, state(1), storage_type=DISK)
        with pytest.raises(PersistError):
            one.wait_latest_checkpoint(60)
        one.save_checkpoint(2, state(2), storage_type=DISK)
        assert one.wait_latest_checkpoint(60) == 2
        assert on_storage(directory) == [2]

    def test_a_retried_persist_writes_the_newest_save(self, ranks: Ranks, directory: Path, monkeypatch):
        monkeypatch.setattr(persister, "FIRST_PAUSE", 0.2)
        tried = self.refusing(monkeypatch, 1)
        (one,) = ranks.start()
        one.save_checkpoint(1, state(1), storage_type=DISK)
        until(lambda: tried == [1], "a first attempt")
        one.save_checkpoint(2, state(2), storage_type=MEMORY)
        assert one.wait_latest_checkpoint(60) == 2
        assert (tried, on_storage(directory)) == ([1, 2], [2])

    def test_saves_superseded_before_a_retry_are_counted(self, ranks: Ranks, directory: Path, monkeypatch):
        """Step 1 was promised twice, step 2 in the pause before the retry, which takes step 3."""
        monkeypatch.setattr(persister, "FIRST_PAUSE", 5)
        publish = CheckpointDirectory.publish
        go_on = threading.Event()
        monkeypatch.setattr(CheckpointDirectory, "publish", lambda *_, **__: go_on.wait(60) and self._refuse())
        (one,) = ranks.start()
        assert one.save_checkpoint(1, state(1), storage_type=DISK)
        assert one.save_checkpoint(1, state(1), directory / "best.pt", storage_type=DISK)
        go_on.set()
        until(lambda: one._writer.link.status().trouble != "", "the first attempt")
        monkeypatch.setattr(CheckpointDirectory, "publish", publish)
        for step in (2, 3):
            assert one.save_checkpoint(step, state(step), storage_type=DISK)
        assert one.wait_latest_checkpoint(60) == 3
        (stats,) = ranks.saver.report()
        assert on_storage(directory) == [3]
        assert sorted((id.step, Path(path).name) for id, path in stats.asked) == [(1, ""), (1, "best.pt"), (2, "")]
        assert "  missed       3 checkpoints that should have been persisted" in summary._lines(stats)

    def test_paths_requested_while_storage_refuses_are_written_after_it(
        self, ranks: Ranks, directory: Path, tmp_path: Path, monkeypatch
    ):
        monkeypatch.setattr(persister, "FIRST_PAUSE", 0.5)
        self.refusing(monkeypatch, 1)
        (one,) = ranks.start()
        assert one.save_checkpoint(1, state(1), storage_type=DISK)
        until(lambda: one._writer.link.status().trouble != "", "the first attempt")
        for name in ("best.pt", "copy.pt"):
            assert one.save_checkpoint(1, state(1), tmp_path / name, storage_type=DISK)
        until(lambda: not any(stats.asked for stats in ranks.saver.report()), "all three places")
        assert one.wait_latest_checkpoint(60) == 1
        assert on_storage(directory) == [1]
        assert (tmp_path / "best.pt").read_bytes() == (tmp_path / "copy.pt").read_bytes()

    def test_memory_whose_final_flush_failed_is_kept_and_resumed(
        self, ranks: Ranks, directory: Path, monkeypatch, said
    ):
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointDirectory, "publish", self._refuse)
            (one,) = ranks.start()
            one.save_checkpoint(1, state(1), storage_type=MEMORY)
            slot = newest_slot(ranks)
            ranks.end()
        assert f"cp -r {slot} DESTINATION" in said.text
        copied = directory / "rescued"
        shutil.copytree(slot, copied)
        (one,) = ranks.start()
        assert one.load_checkpoint(copied)["step"] == 1
        assert one.load_checkpoint()["step"] == 1 and one.loaded_from == "memory"
        ranks.end()
        assert on_storage(directory) == [1]
        assert list(Path(os.environ["FASTCKPT_SHM_DIR"]).iterdir()) == []

    def test_a_flush_beyond_its_timeout_is_abandoned_and_memory_kept(self, ranks: Ranks, monkeypatch, said):
        monkeypatch.setenv("FASTCKPT_FLUSH_TIMEOUT", "0.05")
        release = threading.Event()

        def slow(*_: object, **__: object) -> None:
            release.wait(2)
            raise PersistError("too late")

        monkeypatch.setattr(CheckpointDirectory, "publish", slow)
        (one,) = ranks.start()
        one.save_checkpoint(1, state(1), storage_type=MEMORY)
        arena = one._writer.link.arena
        ranks.end()
        assert "not done in 0.05 s" in said.text and arena.is_dir()
        remove_live(arena)

    @staticmethod
    def _refuse(*_: object, **__: object) -> None:
        raise PersistError("no space left for it")

    def test_hanging_storage_of_one_directory_does_not_delay_another(
        self, ranks: Ranks, directory: Path, tmp_path: Path, monkeypatch
    ):
        """Its flush may take an hour, and another's is done all the same; nor does a fault of our own end that."""
        (one,) = ranks.start()
        others = [Ranks(tmp_path / name, monkeypatch) for name in ("faulty", "fine")]
        for other in others:
            other.start_workers()
        for step, member in enumerate((one, *(other.members[0] for other in others)), start=1):
            assert member.save_checkpoint(step, state(step), storage_type=MEMORY)
            member.close()
        go_on, publish, close = threading.Event(), CheckpointDirectory.publish, coordinator.Coordinator.close

        def slowly(self: CheckpointDirectory, *args, **kwargs):
            if self.path == directory:
                go_on.wait(60)
            return publish(self, *args, **kwargs)

        async def faultily(self: coordinator.Coordinator, **how: bool) -> bool:
            drained = await close(self, **how)
            if self.persister.storage.path == others[0].directory:
                raise ZeroDivisionError
            return drained

        monkeypatch.setattr(CheckpointDirectory, "publish", slowly)
        monkeypatch.setattr(coordinator.Coordinator, "close", faultily)
        ending = threading.Thread(target=ranks.saver.close)
        ending.start()
        until(lambda: on_storage(others[1].directory) == [3], "the other is flushed")
        assert on_storage(directory) == []
        go_on.set()
        ending.join(60)
        assert on_storage(directory) == [1] and on_storage(others[0].directory) == [2]
        assert ranks.saver.unfinished, "what a fault left open is not waited for"


class TestTwoJobs:
    def test_a_second_job_waits_and_is_refused_naming_the_first(
        self, ranks: Ranks, directory: Path, monkeypatch: pytest.MonkeyPatch
    ):
        ranks.start()
        monkeypatch.setattr("fastckpt._core.saver.admission.PATIENCE", 0.5)
        second = Ranks(directory, ranks._monkeypatch)
        try:
            with pytest.raises(PlaceInUse, match=rf"in use by another job, which lives: process {os.getpid()} on "):
                second.start()
            assert not second.saver.may_start_over, "no restart waits again"
        finally:
            second.end()
        assert ranks.members[0].save_checkpoint(1, state(1), storage_type=MEMORY)

    def test_jobs_of_other_directories_do_not_conflict(self, ranks: Ranks, tmp_path: Path):
        (one,) = ranks.start()
        other = Ranks(tmp_path / "other", ranks._monkeypatch)
        (two,) = other.start()
        assert one.save_checkpoint(1, state(1), storage_type=MEMORY) and two.save_checkpoint(
            2, state(2), storage_type=MEMORY
        )
        assert (one.load_checkpoint()["step"], two.load_checkpoint()["step"]) == (1, 2)
        other.end()

    def test_two_checkpointers_of_one_job_may_use_two_directories(self, ranks: Ranks, tmp_path: Path):
        (one,) = ranks.start()
        ranks.directory = tmp_path / "other"
        two = ranks.join(0, 1)
        assert one.save_checkpoint(1, state(1), storage_type=DISK) and two.save_checkpoint(
            2, state(2), storage_type=MEMORY
        )
        assert (one.load_checkpoint()["step"], two.load_checkpoint()["step"]) == (1, 2)
        two.close()

    def test_a_job_that_recreated_a_removed_arena_keeps_it(self, ranks: Ranks, directory: Path, said):
        (one,) = ranks.start()
        assert one.save_checkpoint(1, state(1), storage_type=MEMORY)
        arena = one._writer.link.arena
        histories = CheckpointDirectory(directory).histories
        until(lambda: histories.newest() == 1, "the history is open")
        (directory / ".fastckpt/history-1").unlink()  # else the second job waits for the first, which lives
        remove_live(arena)
        other = Ranks(directory, ranks._monkeypatch)
        (two,) = other.start()
        assert two.save_checkpoint(7, state(7), storage_type=MEMORY)
        held = {slot: slots.read(slot) for slot in arena.glob("slot-*")}
        for step in (2, 3):
            refused = one.save_checkpoint(step, state(step), storage_type=MEMORY)
            assert not refused and "another job has created it again" in refused.reason
        with pytest.raises(FileNotFoundError):
            next(iter(ranks.saver._coordinators.values())).arena.reserve(arena / "slot-0", "model.pt", 4096)
        ranks.workers_die()
        ranks.end()
        assert {slot: slots.read(slot) for slot in arena.glob("slot-*")} == held
        assert on_storage(directory) == [], "the first job's end persists nothing of the second's"
        assert two.load_checkpoint()["step"] == 7 and two.loaded_from == "memory"
        other.end()
        assert on_storage(directory) == [7]

    def test_a_job_that_waits_for_its_arena_does_not_delay_another(self, ranks: Ranks, tmp_path: Path, monkeypatch):
        """Its former owner has died, and a child that it had just forked has the lock still."""
        (one,) = ranks.start()
        waits, go_on, open_arena = threading.Event(), threading.Event(), Arena.open

        def late(*args):
            waits.set()
            go_on.wait(60)
            return open_arena(*args)

        monkeypatch.setattr(Arena, "open", late)
        ranks.directory = tmp_path / "other"
        with ThreadPoolExecutor(1) as thread:
            joining = thread.submit(ranks.join, 0, 1)
            try:
                assert waits.wait(60)
                assert one.save_checkpoint(1, state(1), storage_type=MEMORY)
                assert not joining.done()
            finally:
                go_on.set()
            joining.result(60).close()

    @pytest.mark.parametrize("what", ["mode", "link"])
    def test_an_arena_that_is_not_private_is_refused(self, ranks: Ranks, directory: Path, tmp_path: Path, what: str):
        path = arena_path(os.environ["FASTCKPT_SHM_DIR"], os.path.realpath(directory), 0)
        if what == "mode":
            path.mkdir()
            path.chmod(0o755)
        else:
            (tmp_path / "elsewhere").mkdir(mode=0o700)
            path.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ArenaInUse, match=r"not a private directory.*remove it, or choose"):
            ranks.start()
        path.rmdir() if what == "mode" else path.unlink()


class TestFailedOpen:
    @pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory to somebody else")
    def test_an_arena_has_another_name_where_others_have_its_own_and_is_found_again(
        self, ranks: Ranks, directory: Path, said
    ):
        place = Path(os.environ["FASTCKPT_SHM_DIR"])
        first, second, *more = arena_paths(str(place), os.path.realpath(directory), 0)
        first.mkdir()
        os.chown(first, OTHER, OTHER)
        assert left_in_memory(ranks, directory) == second
        assert said.text.count(f"{first} was made by user {OTHER}, under the name of this user's memory") == 1
        [entry] = [each for each in census(place) if each.directory == os.path.realpath(directory)]
        assert entry.path == second and entry.newest and entry.newest.step == 2
        first.rmdir()  # a name that is free again is not that of the memory that is there
        (one,) = ranks.start()
        assert one.load_checkpoint()["step"] == 2 and one.loaded_from == "memory"
        ranks.end()
        for path in (first, second, *more):
            path.mkdir()
            os.chown(path, OTHER, OTHER)
        with pytest.raises(ArenaInUse, match=rf"{first} is not a private directory .*owner {OTHER}"):
            ranks.start()
        for path in (first, second, *more):
            path.rmdir()

    def test_every_rank_receives_the_cause_of_a_failed_open(self, ranks: Ranks, monkeypatch):
        """Not that the directory is in use: by this very job."""

        def refuse(*_: object) -> None:
            raise PersistError("the disk cannot be read")

        ranks.start(0)
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointDirectory, "scan", refuse)
            for rank in (0, 1):
                with pytest.raises(FastckptError, match="the disk cannot be read"):
                    ranks.members.append(ranks.join(rank, 2))
        gc.collect()
        ranks.members.append(ranks.join(0, 1))

    def test_after_an_internal_error_the_arena_is_released(self, ranks: Ranks, monkeypatch):
        ranks.start(0)
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointDirectory, "scan", lambda *_: 1 / 0)
            with pytest.raises(SaverError, match="ZeroDivisionError"):
                ranks.members.append(ranks.join(0, 1))
        ranks.members.append(ranks.join(0, 1))

    def test_an_error_by_the_name_of_a_function_is_an_error_of_the_saver(self, ranks: Ranks, monkeypatch):
        """The worker looks for the name among our errors, beside which there are functions."""

        def fail(*_: object) -> None:
            raise type("code_of", (Exception,), {})

        ranks.start(0)
        monkeypatch.setattr(CheckpointDirectory, "scan", fail)
        with pytest.raises(SaverError, match="code_of"):
            ranks.members.append(ranks.join(0, 1))

    def test_a_directory_with_leftovers_of_an_earlier_layout_opens(self, ranks: Ranks, directory: Path):
        (directory / ".fastckpt" / "writers").mkdir(parents=True)
        (one,) = ranks.start()
        assert one.save_checkpoint(1, state(1), storage_type=MEMORY) and one.load_checkpoint()["step"] == 1
        shutil.rmtree(directory / ".fastckpt")

    def test_a_long_path_to_shared_memory_works_or_is_refused_with_its_length(self, ranks: Ranks, monkeypatch):
        deep = Path(os.environ["FASTCKPT_SHM_DIR"]) / ("d" * 120) / ("e" * 120)
        deep.mkdir(parents=True)
        monkeypatch.setenv("FASTCKPT_SHM_DIR", str(deep))
        try:
            (one,) = ranks.start()
            assert one.save_checkpoint(1, state(1), storage_type=MEMORY)
        finally:
            ranks.end()
            shutil.rmtree(deep.parent)

    def test_a_directory_for_shared_memory_that_does_not_exist_is_an_error(self, ranks: Ranks, monkeypatch):
        monkeypatch.setenv("FASTCKPT_SHM_DIR", "/nowhere/at/all")
        with pytest.raises(FastckptError, match="/nowhere/at/all"):
            ranks.start()
        gc.collect()


class TestOrphans:
    def test_memory_that_an_orphan_may_write_to_is_not_resumed(self, ranks: Ranks, directory: Path, monkeypatch, said):
        monkeypatch.setattr(coordinator, "ORPHANS_DEADLINE", 0.1)
        path = left_in_memory(ranks, directory)
        orphan = Presence(path)
        (one,) = ranks.start()
        orphan.close()
        assert "writers of an earlier job still use" in said.text
        assert one.load_checkpoint()["step"] == 1 and one.loaded_from == "storage"
        assert one.save_checkpoint(3, state(3), storage_type=MEMORY)

    def test_an_orphan_that_is_about_to_die_is_waited_for(self, ranks: Ranks, directory: Path):
        path = left_in_memory(ranks, directory)
        threading.Timer(0.3, Presence(path).close).start()
        (one,) = ranks.start()
        assert one.load_checkpoint()["step"] == 2 and one.loaded_from == "memory"


class TestHangingStorage:
    def test_an_unreadable_mark_at_a_launch_keeps_the_memory(self, ranks: Ranks, directory: Path):
        """Nobody can tell then whether what is in memory belongs to this directory."""
        left_in_memory(ranks, directory)
        mark = directory / ".fastckpt/identity"
        aside = mark.rename(mark.with_name("aside"))
        mark.mkdir()
        with pytest.raises(PersistError, match="cannot read the mark"):
            ranks.start()
        mark.rmdir()
        aside.rename(mark)
        (one,) = ranks.start_workers()
        assert one.load_checkpoint()["step"] == 2 and one.loaded_from == "memory"


class TestSweep:
    @pytest.mark.parametrize(("boot", "swept"), [("an earlier one", True), ("", False)])
    def test_a_launch_removes_what_is_left_of_earlier_boots_alone(
        self, ranks: Ranks, directory: Path, boot: str, swept: bool
    ):
        """What is of this boot may still be adopted."""
        arena = left_in_memory(ranks, directory)
        owner = json.loads((arena / "owner").read_text())
        (arena / "owner").write_text(json.dumps(owner | ({"boot": boot} if boot else {})))
        other = arena.with_name(f"{arena.name[:-4]}beef")
        shutil.copytree(arena, other)
        (one,) = ranks.start()
        assert other.exists() is not swept
        assert one.load_checkpoint()["step"] == (1 if swept else 2)
        ranks.end()
        shutil.rmtree(other, ignore_errors=True)


class TestStrangeLeftovers:
    @pytest.mark.parametrize("name", [".done-0", ".begin", "model.pt", "rank_0.pt"])
    @pytest.mark.parametrize("kind", ["fifo", "link", "directory", "loop"])
    def test_foreign_files_in_an_arena_are_not_resumed_and_are_replaced(
        self, ranks: Ranks, directory: Path, tmp_path: Path, name: str, kind: str
    ):
        arena = left_in_memory(ranks, directory)
        (slot,) = [slot for slot in arena.glob("slot-*") if slots.read(slot).committed == (1, 2)]
        strange, elsewhere = slot / name, tmp_path / "elsewhere"
        shutil.move(strange, elsewhere)
        before = elsewhere.read_bytes()
        if kind == "fifo":
            os.mkfifo(strange)
        elif kind == "link":
            strange.symlink_to(elsewhere)
        elif kind == "directory":
            (strange / "within").mkdir(parents=True)
        else:
            strange.symlink_to(strange)
        (one,) = ranks.start()
        assert one.load_checkpoint()["step"] == 1
        for step in range(3, 9):
            assert one.save_checkpoint(step, state(step), storage_type=MEMORY), "each slot can be written to"
        assert one.load_checkpoint()["step"] == 8 and one.loaded_from == "memory"
        assert elsewhere.read_bytes() == before

    def test_foreign_files_placed_in_a_running_arena_skip_one_save_at_worst(self, ranks: Ranks, directory: Path):
        (one,) = ranks.start()
        for step in range(1, 4):
            assert one.save_checkpoint(step, state(step), storage_type=MEMORY)
        for slot in one._writer.link.arena.glob("slot-*"):
            if slots.read(slot).committed != (1, 3):
                os.mkfifo(slot / ".done-7")
                (slot / "model.pt").rename(slot / "other.pt")
                (slot / "model.pt").symlink_to(slot / "other.pt")
        results = [one.save_checkpoint(step, state(step), storage_type=MEMORY) for step in range(4, 10)]
        assert results[-1].saved
        ranks.workers_die()
        (one,) = ranks.start_workers()
        assert one.load_checkpoint()["step"] == 9 and one.loaded_from == "memory"


class TestConnections:
    @pytest.fixture
    def saver(self):
        saver = Saver(Settings.from_environment())
        saver.start()
        yield saver
        saver.close()

    @staticmethod
    def hello(directory: Path, **changes: object) -> m.Hello:
        fields = {"local_rank": 0, "local_world_size": 1, "world_size": 1, "group_rank": 0, "restart_count": 0}
        return m.Hello(str(directory), **(fields | changes))  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "data",
        [b"", b"\1", b"\xff\xff\xff\xff", b"\2\0\0\0{}", b"\4\0\0\0null", struct.pack("<I", 1 << 20) + b"x",
         pack(m.Pin()), pack(m.Done()), pack(m.Committed(1, 1, True)), struct.pack("<I", 15) + b'{"message": []}'],
    )  # fmt: skip
    def test_an_invalid_message_ends_its_own_connection_only(self, saver: Saver, directory: Path, data: bytes):
        good = Channel(saver.address, 10)
        assert isinstance(good.ask(self.hello(directory)), m.Welcome)
        with socket.socket(socket.AF_UNIX) as bad:
            bad.connect("\0" + saver.address[1:])
            bad.sendall(data)
            bad.shutdown(socket.SHUT_WR)
            bad.settimeout(30)
            while bad.recv(4096):
                pass
        assert isinstance(good.ask(m.Ask()), m.Status)
        good.close()

    @pytest.mark.parametrize("changes", [{"local_world_size": 0}, {"local_rank": 5}, {"policy": {"keep": "none"}}])
    def test_an_invalid_hello_is_refused_and_the_next_is_accepted(self, saver: Saver, directory: Path, changes):
        bad = Channel(saver.address, 10)
        try:
            assert isinstance(bad.ask(self.hello(directory, **changes)), m.Failed)
        finally:
            bad.close()
        good = Channel(saver.address, 10)
        assert isinstance(good.ask(self.hello(directory)), m.Welcome)
        good.close()

    def test_a_refused_connection_does_not_disturb_an_open_one(self, saver: Saver, directory: Path):
        good = Channel(saver.address, 10)
        assert isinstance(good.ask(self.hello(directory)), m.Welcome)
        (coordinator,) = saver._coordinators.values()
        coordinator.slots[0].pins[f"reader {os.getpid()}"] = "it is being loaded"
        for _ in range(3):
            bad = Channel(saver.address, 10)
            refused = bad.ask(self.hello(directory))
            assert isinstance(refused, m.Failed) and "close that one first" in refused.text
            bad.close()
            until(lambda: len(saver._connections) == 1, "its end is noticed")
        assert coordinator.slots[0].pins
        good.close()
        until(lambda: not coordinator.slots[0].pins, "its end is noticed")

    def test_the_end_does_not_wait_for_a_connection_without_a_hello(self, saver: Saver, monkeypatch):
        monkeypatch.setattr("fastckpt._core.saver.server.WRITERS_TIMEOUT", 3600)
        program = f"""
import socket, time
s = socket.socket(socket.AF_UNIX)
s.connect("\\0" + {saver.address[1:]!r})
print(flush=True)
time.sleep(3600)
"""
        with subprocess.Popen([sys.executable, "-S", "-c", program], stdout=subprocess.PIPE) as silent:
            silent.stdout.readline()
            until(lambda: saver._connections, "it is connected")
            saver.close()
            silent.kill()

    def test_the_end_of_one_connection_does_not_end_the_watch_over_the_next(self):
        """The first has died, but its connection ends only when its descriptor's number has been reused."""

        async def watch() -> None:
            stops, streams = [], []
            for _ in range(2):
                with subprocess.Popen(["sleep", "60"]) as process:
                    streams.append(asyncio.StreamReader())
                    stops.append(_watch(process.pid, streams[-1]))
                    stops[0]() if len(stops) == 2 else None
                    process.kill()
                    await asyncio.wait_for(streams[-1].read(), 30)
            stops[1]()

        asyncio.run(watch())

    @pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
    def test_a_connection_of_another_user_is_refused(self, saver: Saver):
        program = f"""
import os, socket
os.setuid(65534)
s = socket.socket(socket.AF_UNIX)
s.connect("\\0" + {saver.address[1:]!r})
s.settimeout(30)
try:
    s.sendall({pack(m.Ask())!r})
    print("answer", s.recv(100))
except OSError as error:
    print("answer", b"")
"""
        found = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True)
        assert found.stdout == "answer b''\n"

    def test_answers_are_in_the_order_of_requests_however_these_arrive(self, saver: Saver, directory: Path):
        with socket.socket(socket.AF_UNIX) as slow:
            slow.connect("\0" + saver.address[1:])
            for byte in pack(self.hello(directory)) + pack(m.Ask()):
                slow.sendall(bytes([byte]))
            slow.settimeout(30)
            data = b""
            while b"Status" not in data:
                data += slow.recv(4096)
            assert data.index(b"Welcome") < data.index(b"Status")


class TestKilledRanks:
    def test_a_save_without_the_part_of_a_killed_rank_is_no_checkpoint(self, ranks: Ranks, monkeypatch):
        """The first rank may get as far as a save before the agent kills it, too."""
        first, second = ranks.start(2)
        for member in (first, second):
            member.save_checkpoint(1, state(1), storage_type=MEMORY)
        second._writer.close()  # which lends nothing
        ranks.members = [first]
        program = f"""
import os, signal
from fastckpt.ddp import DdpCheckpointer
checkpointer = DdpCheckpointer({str(ranks.directory)!r})
os.kill(os.getpid(), signal.SIGKILL)
"""
        environment = os.environ | {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, check=False)
        assert done.returncode == -signal.SIGKILL
        time.sleep(0.3)  # the saver learns of it
        first.save_checkpoint(2, state(2), storage_type=MEMORY)
        steps = [slots.read(slot).committed for slot in first._writer.link.arena.glob("slot-*")]
        assert max(id.step for id in steps if id) == 1


class TestPins:
    def test_a_reader_that_dies_pins_nothing(self, ranks: Ranks):
        (one,) = ranks.start()
        one.save_checkpoint(1, state(1), storage_type=MEMORY)
        one.save_checkpoint(2, state(2), storage_type=MEMORY)
        ranks.workers_die()
        program = f"""
import os, signal, time
from fastckpt._core.ipc import messages as m
from fastckpt._core.ipc.channel import Channel
channel = Channel({ranks.saver.address!r}, 10)
channel.ask(m.Hello({str(ranks.directory)!r}, 0, 1, 1, 0, 0))
print(len(channel.ask(m.Pin()).slots), flush=True)
if os.fork() == 0:  # a child keeps the socket open
    time.sleep(60)
    os._exit(0)
os.kill(os.getpid(), signal.SIGKILL)
"""
        command = [sys.executable, "-c", program]
        reader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True)
        assert reader.stdout.readline() == "2\n"
        reader.wait(60)
        (one,) = ranks.start_workers()
        steps = itertools.count(3)
        until(lambda: one.save_checkpoint(next(steps), state(3), storage_type=MEMORY).saved, "the pins are gone")
        for step in range(100, 106):
            assert one.save_checkpoint(step, state(step), storage_type=MEMORY), "each slot can be written to again"
        os.killpg(reader.pid, signal.SIGKILL)
        reader.stdout.close()


def test_without_a_telemetry_block_everything_else_works(ranks: Ranks, said):
    """Somebody has cleaned up in /dev/shm."""
    (one,) = ranks.start()
    one.save_checkpoint(1, state(1), storage_type=MEMORY)
    unlink(telemetry_name(one._writer.link.arena))
    assert one.save_checkpoint(2, state(2), storage_type=MEMORY)
    ranks.workers_die()
    (one,) = ranks.start_workers()
    assert "cannot report its progress" in said.text
    assert one.load_checkpoint()["step"] == 2
    assert one.save_checkpoint(3, state(3), storage_type=MEMORY)


def test_the_telemetry_of_a_killed_worker_has_its_last_step(ranks: Ranks):
    """A worker of its own process, killed as it enters the fill of step 2."""
    ranks.start(0)
    arena = arena_path(os.environ["FASTCKPT_SHM_DIR"], os.path.realpath(ranks.directory), 0)
    program = f"""
import os, signal, torch
from fastckpt._core import metrics
from fastckpt.ddp import DdpCheckpointer
checkpointer = DdpCheckpointer({str(ranks.directory)!r})
def observe(phase, fields):
    if (phase, fields.get("step")) == ("snapshot.fill", 2):
        os.kill(os.getpid(), signal.SIGKILL)
metrics.observe(observe)
for step in (1, 2):
    checkpointer.save_checkpoint(step, {{"weights": torch.ones(10)}})
"""
    started = time.monotonic_ns()
    environment = os.environ | {"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "4"}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    block = TelemetryBlock(telemetry_name(arena))
    found = block.read(0)
    block.close()
    assert (found.generation, found.step, found.phase) == (4, 1, "snapshot.fill"), (
        "a step is named when its save is over"
    )
    assert started < found.beat < time.monotonic_ns()
    ranks.workers_die()
    (one,) = ranks.start_workers()
    assert one.load_checkpoint() and one.loaded_step == 1


def test_the_last_report_gives_progress_of_workers_whose_node_changed_rank(tmp_path: Path):
    """Ranks of nodes change when one comes or goes: each has an arena, and what was said there before stays."""
    saver, directory = Saver(Settings.from_environment()), str(tmp_path)
    saver.start()
    try:
        for generation, group_rank in enumerate((1, 0, 1)):
            channel = Channel(saver.address, 10)
            channel.send(m.Hello(directory, 0, 1, 2, group_rank, generation, {}, "resume", "", {}, group_rank, 0.0))
            welcome = channel.answer(60)
            assert isinstance(welcome, m.Welcome)
            block = TelemetryBlock(welcome.telemetry)
            block.line(0).begin(generation, os.getpid(), 0)
            assert [line.generation for line in saver.telemetry()[directory]] == [generation]
            block.close()
            channel.close()
    finally:
        saver.close()


def test_wait_does_not_wait_for_a_save_that_the_rank_has_yet_to_make(ranks: Ranks):
    first, second = ranks.start(2)
    for step in (1, 2):
        first.save_checkpoint(step, state(step), storage_type=DISK)
        if step == 1:
            second.save_checkpoint(step, state(step), storage_type=DISK)
    assert second.wait_latest_checkpoint(60) == 1
    with pytest.raises(TimeoutError, match="1 checkpoints are not durable"):
        first.wait_latest_checkpoint(0.2)


def test_wait_does_not_wait_for_a_save_that_a_departed_rank_cannot_complete(ranks: Ranks):
    """Whoever writes its part before the other has left, or after."""
    first, second = ranks.start(2)
    first.save_checkpoint(1, state(1), storage_type=DISK)
    second._writer.close()  # which lends nothing
    assert first.wait_latest_checkpoint(10) is None
    assert first.save_checkpoint(2, state(2), storage_type=DISK).reason == "rank 1 has closed"
    assert first.wait_latest_checkpoint(10) is None


def test_a_connection_that_timed_out_names_that_reason_for_later_requests():
    address = f"@fastckpt-test-mute-{os.getpid()}"
    listener = bind(address)  # accepts, as the kernel does, and never says a word
    channel = Channel(address, 10)
    for _ in range(2):
        with pytest.raises(AgentLost, match="did not answer in time"):
            channel.ask(m.Ask(), timeout=0.1)
    listener.close()


def test_a_history_record_is_renewed_during_the_final_flush(
    ranks: Ranks, directory: Path, monkeypatch: pytest.MonkeyPatch
):
    """Else another launch would take this job for dead, and begin while it still publishes."""
    monkeypatch.setattr("fastckpt._core.saver.persistence.tenure.RENEWAL", 0.05)
    (member,) = ranks.start()
    assert member.save_checkpoint(1, state(1), storage_type=MEMORY)
    histories = CheckpointDirectory(directory).histories
    until(lambda: histories.newest() == 1, "the history is open")
    publish, renewals = CheckpointDirectory.publish, list[int]()

    def slowly(self, *arguments, **more):
        before, end = histories.read(1).count, time.monotonic() + 20
        while not (renewed := histories.read(1).count - before) and time.monotonic() < end:
            time.sleep(0.01)
        renewals.append(renewed)
        return publish(self, *arguments, **more)

    monkeypatch.setattr(CheckpointDirectory, "publish", slowly)
    ranks.end()
    assert on_storage(directory) == [1] and renewals[0] > 0
