"""The saver: what it keeps when writers die, send invalid messages or lag, and when storage refuses."""

import asyncio
import errno
import gc
import json
import multiprocessing
import os
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastckpt._core import metrics
from fastckpt._core.client.save_results import TO_DISK
from fastckpt._core.config import Settings
from fastckpt._core.format.ids import SaveId
from fastckpt._core.ipc import messages as m
from fastckpt._core.ipc.channel import Channel, pack
from fastckpt._core.memory import slots
from fastckpt._core.memory.arena import arena_paths
from fastckpt._core.memory.census import census
from fastckpt._core.memory.presence import Presence
from fastckpt._core.memory.processes import Process
from fastckpt._core.memory.records import write_record
from fastckpt._core.memory.telemetry import TelemetryBlock, telemetry_name, unlink
from fastckpt._core.saver import coordinator
from fastckpt._core.saver.persistence import persister
from fastckpt._core.saver.server import Saver
from fastckpt._core.saver.worker_connection import _watch
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt.ddp import DdpCheckpointer, StorageType
from fastckpt.errors import ArenaInUse, PersistError, PlaceInUse, SaverError
from tests.e2e.ddp.conftest import Ranks, on_storage, state, until
from tests.support.live_folders import remove_live

DISK, MEMORY = StorageType.DISK, StorageType.MEMORY
OTHER = 77
"""A user who runs no job."""
only_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")


def save(member: DdpCheckpointer, step: int, kind: StorageType = MEMORY, *path: Path) -> Any:
    return member.save_checkpoint(step, state(step), *path, storage_type=kind)


def slots_of(member: DdpCheckpointer) -> list[Path]:
    return [*member._writer.link.arena.glob("slot-*")]


def committed(slot: Path) -> Any:
    return slots.read(slot).committed


def left_in_memory(ranks: Ranks, directory: Path) -> Path:
    """Step 1 on storage; step 2 in the arena of an owner that is gone."""
    (one,) = ranks.start()
    save(one, 1, DISK)
    one.wait_latest_checkpoint(60)
    one._writer.link.committed = lambda *_, **__: None  # type: ignore[method-assign]  # records count, not messages
    save(one, 2)
    path = one._writer.link.arena
    kept = path.with_name("kept")
    shutil.copytree(path, kept)
    ranks.end()
    shutil.rmtree(directory / "checkpoint-2")
    kept.rename(path)
    return path


def refuse(*_: object, **__: object) -> None:
    raise PersistError("no space left for it")


def assert_resumed(ranks: Ranks, step: int, place: str) -> None:
    (one,) = ranks.members
    assert (one.load_checkpoint()["step"], one.loaded_from) == (step, place)


class TestRecordsCountNotMessages:
    def test_a_save_that_one_writer_has_not_finished_is_dropped_after_its_death(self, ranks: Ranks, monkeypatch, said):
        """Also without any unlink, which is reported: the flush of the newest whole save, and the next workers."""
        first, second = ranks.start(2)
        for member in (first, second):
            save(member, 1)
        save(first, 2, DISK)
        (half,) = (slot for slot in slots_of(first) if slots.read(slot).begin and not committed(slot))
        with monkeypatch.context() as patch:

            def fail(path: os.PathLike[str], **_: object) -> None:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

            write_record(half.parent / "writer-1-1", replace(Process.current(), ticks=1).to_record())
            for name in ("unlink", "remove"):
                patch.setattr(os, name, fail)
            ranks.workers_die()
            assert "the signature of a writer" in said.text
            assert slots.read(half).begin is None
        ranks.start_workers(2)
        assert [loaded["step"] for loaded in ranks.load()] == [1, 1]
        for member in ranks.members:
            assert save(member, 2, DISK)
        assert ranks.members[0].wait_latest_checkpoint(60) == 2

    def test_neither_a_report_without_a_record_nor_parts_of_two_generations_of_workers_complete_a_save(
        self, ranks: Ranks
    ):
        """Rank 0 had saved step 2; after the restart rank 1 saves step 2: that is no checkpoint."""
        first, second = ranks.start(2)
        save(first, 1)
        (slot,) = (slot for slot in slots_of(first) if slots.read(slot).begin)
        second._writer.link.committed(SaveId(1, 1), TO_DISK)
        assert second._writer.link.status().waiting == 0 and committed(slot) is None
        assert save(second, 1) and committed(slot) == (1, 1)
        save(first, 2)
        ranks.workers_die()
        ranks.start_workers(2)
        ranks.load()
        save(ranks.members[1], 2)
        assert [loaded["step"] for loaded in ranks.load()] == [1, 1]


class TestFailingStorage:
    @pytest.fixture(autouse=True)
    def soon(self, monkeypatch):
        monkeypatch.setattr(persister, "FIRST_PAUSE", 0.01)

    def refusing(self, monkeypatch, times: int) -> list[int]:
        """Storage that refuses so often; the steps that it was given."""
        publish, tried = CheckpointDirectory.publish, []

        def sometimes(self: CheckpointDirectory, request: PublishRequest) -> object:
            tried.append(request.id.step)
            if len(tried) <= times:
                refuse()
            return publish(self, request)

        monkeypatch.setattr(CheckpointDirectory, "publish", sometimes)
        return tried

    def test_saves_continue_and_report_it_while_storage_refuses_until_a_retry_succeeds(
        self, ranks: Ranks, directory: Path, monkeypatch
    ):
        before = metrics.counts["persist_failures"]
        tried = self.refusing(monkeypatch, persister.ATTEMPTS + 3)
        (one,) = ranks.start()
        assert save(one, 1, DISK)
        with pytest.raises(PersistError, match=r"step 1 of history 1 could not be persisted .*no space left for it"):
            one.wait_latest_checkpoint(60)
        results = [save(one, step) for step in (2, 3, 4, 5)]
        assert all(result.saved for result in results) and "no space left for it" in results[-1].trouble
        assert save(one, 6, DISK)
        assert one.wait_latest_checkpoint(60) == 6
        assert tried == [1] * persister.ATTEMPTS + [6] * 4 and on_storage(directory) == [6]
        assert metrics.counts["persist_failures"] == before + persister.ATTEMPTS + 3
        assert save(one, 7).trouble == ""

    def test_paths_requested_while_storage_refuses_are_written_after_it(
        self, ranks: Ranks, directory: Path, tmp_path: Path, monkeypatch
    ):
        monkeypatch.setattr(persister, "FIRST_PAUSE", 0.5)
        self.refusing(monkeypatch, 1)
        (one,) = ranks.start()
        assert save(one, 1, DISK)
        until(lambda: one._writer.link.status().trouble != "", "the first attempt")
        for name in ("best.pt", "copy.pt"):
            assert save(one, 1, DISK, tmp_path / name)
        until(lambda: not any(stats.asked for stats in ranks.saver.report()), "all three places")
        assert one.wait_latest_checkpoint(60) == 1 and on_storage(directory) == [1]
        assert (tmp_path / "best.pt").read_bytes() == (tmp_path / "copy.pt").read_bytes()

    @pytest.mark.parametrize("timeout", ["", "0.05"])
    def test_memory_whose_final_flush_failed_or_was_abandoned_is_kept_and_resumed(
        self, ranks: Ranks, directory: Path, monkeypatch, said, timeout: str
    ):
        with monkeypatch.context() as patch:
            if timeout:
                patch.setenv("FASTCKPT_FLUSH_TIMEOUT", timeout)
            patch.setattr(CheckpointDirectory, "publish", lambda *_, **__: (timeout and time.sleep(0.5)) or refuse())
            (one,) = ranks.start()
            save(one, 1)
            (slot,) = (slot for slot in slots_of(one) if committed(slot))
            ranks.end()
        assert ("not done in 0.05 s" if timeout else f"cp -r {slot} DESTINATION") in said.text
        copied = directory / "rescued"
        shutil.copytree(slot, copied)
        (one,) = ranks.start()
        assert one.load_checkpoint(copied)["step"] == 1
        assert_resumed(ranks, 1, "memory")
        ranks.end()
        assert on_storage(directory) == [1]
        assert list(Path(os.environ["FASTCKPT_SHM_DIR"]).iterdir()) == []

    def test_hanging_storage_of_one_directory_does_not_delay_another(
        self, ranks: Ranks, directory: Path, tmp_path: Path, monkeypatch
    ):
        """Its flush may take an hour, and another's is done all the same."""
        other = Ranks(tmp_path / "fine", monkeypatch)
        for step, member in enumerate((*ranks.start(), *other.start_workers()), start=1):
            assert save(member, step)
            member.close()
        go_on, publish = threading.Event(), CheckpointDirectory.publish

        def slowly(self: CheckpointDirectory, *args, **kwargs):
            if self.path == directory:
                go_on.wait(60)
            return publish(self, *args, **kwargs)

        monkeypatch.setattr(CheckpointDirectory, "publish", slowly)
        ending = threading.Thread(target=ranks.saver.close)
        ending.start()
        until(lambda: on_storage(other.directory) == [2], "the other is flushed")
        assert on_storage(directory) == []
        go_on.set()
        ending.join(60)
        assert on_storage(directory) == [1] and not ranks.saver.unfinished


class TestTwoJobs:
    def test_a_second_job_waits_and_is_refused_naming_the_first(self, ranks: Ranks, directory: Path, monkeypatch):
        ranks.start()
        monkeypatch.setattr("fastckpt._core.saver.admission.PATIENCE", 0.1)
        second = Ranks(directory, monkeypatch)
        try:
            lives = rf"in use by another job, which lives: process {os.getpid()} on .*start with --fast-take-over\."
            with pytest.raises(PlaceInUse, match=lives):
                second.start()
            assert not second.saver.may_start_over, "no restart waits again"
        finally:
            second.end()
        assert save(ranks.members[0], 1)

    def test_a_job_that_recreated_a_removed_arena_keeps_it(self, ranks: Ranks, directory: Path, said):
        (one,) = ranks.start()
        assert save(one, 1)
        arena = one._writer.link.arena
        histories = CheckpointDirectory(directory).histories
        until(lambda: histories.newest() == 1, "the history is open")
        (directory / ".fastckpt/history-1").unlink()  # else the second job waits for the first, which lives
        remove_live(arena)
        other = Ranks(directory, ranks._monkeypatch)
        (two,) = other.start()
        assert save(two, 7)
        held = {slot: slots.read(slot) for slot in arena.glob("slot-*")}
        for step in (2, 3):
            refused = save(one, step)
            assert not refused and "another job has created it again" in refused.reason
        with pytest.raises(FileNotFoundError):
            next(iter(ranks.saver._coordinators.values())).arena.reserve(arena / "slot-0", "model.pt", 4096)
        ranks.workers_die()
        ranks.end()
        assert {slot: slots.read(slot) for slot in arena.glob("slot-*")} == held
        assert on_storage(directory) == [], "the first job's end persists nothing of the second's"
        assert_resumed(other, 7, "memory")
        other.end()
        assert on_storage(directory) == [7]


class TestFailedOpen:
    @only_root
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
        ranks.start()
        assert_resumed(ranks, 2, "memory")
        ranks.end()
        for path in (first, second, *more):
            path.mkdir()
            os.chown(path, OTHER, OTHER)
        with pytest.raises(ArenaInUse, match=rf"{first} is not a private directory .*owner {OTHER}"):
            ranks.start()
        for path in (first, second, *more):
            path.rmdir()

    def test_every_rank_receives_the_cause_of_a_failed_open_and_the_arena_is_released(self, ranks: Ranks, monkeypatch):
        """Not that the directory is in use: by this very job."""

        class code_of(Exception):
            """The worker looks for the name among our errors, beside which there are functions."""

        def fail(*_: object) -> None:
            raise code_of

        ranks.start(0)
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointDirectory, "scan", fail)
            for rank in (0, 1):
                with pytest.raises(SaverError, match="code_of"):
                    ranks.members.append(ranks.join(rank, 2))
        gc.collect()
        ranks.members.append(ranks.join(0, 1))


@pytest.mark.parametrize(("deadline", "step", "place"), [(0.1, 1, "storage"), (30, 2, "memory")])
def test_memory_that_an_orphan_may_write_to_is_resumed_once_it_has_died_in_time(
    ranks: Ranks, directory: Path, monkeypatch, said, deadline: float, step: int, place: str
):
    monkeypatch.setattr(coordinator, "ORPHANS_DEADLINE", deadline)
    dies = threading.Timer(0.4, Presence(left_in_memory(ranks, directory)).close)
    dies.start()
    (one,) = ranks.start()
    dies.join()
    assert ("writers of an earlier job still use" in said.text) == (place == "storage")
    assert_resumed(ranks, step, place)
    assert save(one, 3)


def test_an_unreadable_mark_at_a_launch_keeps_the_memory(ranks: Ranks, directory: Path):
    """Nobody can tell then whether what is in memory belongs to this directory."""
    left_in_memory(ranks, directory)
    mark = directory / ".fastckpt/identity"
    aside = mark.rename(mark.with_name("aside"))
    mark.mkdir()
    with pytest.raises(PersistError, match="cannot read the mark"):
        ranks.start()
    mark.rmdir()
    aside.rename(mark)
    ranks.start_workers()
    assert_resumed(ranks, 2, "memory")


def test_a_launch_removes_what_is_left_of_earlier_boots_alone(ranks: Ranks, directory: Path):
    arena = left_in_memory(ranks, directory)
    owner = json.loads((arena / "owner").read_text())
    (arena / "owner").write_text(json.dumps(owner | {"boot": "an earlier one"}))
    other = arena.with_name(f"{arena.name[:-4]}beef")
    shutil.copytree(arena, other)
    ranks.start()
    assert not other.exists()
    assert_resumed(ranks, 1, "storage")


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

    @staticmethod
    def refusal(address: str, hello: m.Hello) -> str:
        with closing(Channel(address, 10)) as channel:
            answer = channel.ask(hello)
            assert isinstance(answer, m.Failed)
            return answer.text

    def test_an_invalid_message_or_a_refused_hello_ends_its_own_connection_only(self, saver: Saver, directory: Path):
        changes: list[dict[str, object]] = [{"local_world_size": 0}, {"local_rank": 5}, {"policy": {"keep": "none"}}]
        for changed in changes:
            assert self.refusal(saver.address, self.hello(directory, **changed)), changed
        good = Channel(saver.address, 10)
        assert isinstance(good.ask(self.hello(directory)), m.Welcome)
        (coordinator,) = saver._coordinators.values()
        coordinator.slots[0].pins[f"reader {os.getpid()}"] = "it is being loaded"
        assert "close that one first" in self.refusal(saver.address, self.hello(directory))
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:  # a child with our environment
            says = f"says that it is rank 0, but that is process {os.getpid()}"
            assert says in pool.submit(self.refusal, saver.address, self.hello(directory)).result(60)
        for data in (b"\xff\xff\xff\xff", b"\4\0\0\0null", pack(m.Pin()), pack(m.Committed(1, 1, True))):
            with socket.socket(socket.AF_UNIX) as bad:
                bad.connect("\0" + saver.address[1:])
                bad.sendall(data)
                bad.shutdown(socket.SHUT_WR)
                bad.settimeout(30)
                while bad.recv(4096):
                    pass
        until(lambda: len(saver._connections) == 1, "their ends are noticed")
        assert isinstance(good.ask(m.Ask()), m.Status) and coordinator.slots[0].pins
        good.close()
        until(lambda: not coordinator.slots[0].pins, "its end is noticed")

    def test_a_reader_that_dies_pins_nothing_though_a_child_of_it_keeps_the_socket(self, saver: Saver, directory: Path):
        here, there = os.pipe()
        if (reader := os.fork()) == 0:
            channel = Channel(saver.address, 10)
            channel.ask(self.hello(directory))
            if (child := os.fork()) == 0:
                signal.pause()
            os.write(there, struct.pack("<i", child))
            signal.pause()
        (child,) = struct.unpack("<i", os.read(here, 4))
        (coordinator,) = saver._coordinators.values()
        coordinator.slots[0].pins[f"reader {reader}"] = "it is being loaded"
        os.kill(reader, signal.SIGKILL)
        os.waitpid(reader, 0)
        until(lambda: not coordinator.slots[0].pins, "its end is noticed")
        os.kill(child, signal.SIGKILL)
        for end in (here, there):
            os.close(end)

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

    def test_the_last_report_gives_progress_of_workers_whose_node_changed_rank(self, saver: Saver, tmp_path: Path):
        """Ranks of nodes change when one comes or goes: each has an arena, and what was said there before stays."""
        for generation, group_rank in enumerate((1, 0, 1)):
            channel = Channel(saver.address, 10)
            place = {"world_size": 2, "group_rank": group_rank, "restart_count": generation, "rank": group_rank}
            welcome = channel.ask(self.hello(tmp_path, **place), 60)
            assert isinstance(welcome, m.Welcome)
            block = TelemetryBlock(welcome.telemetry)
            block.line(0).begin(generation, os.getpid(), 0)
            assert [line.generation for line in saver.telemetry()[str(tmp_path)]] == [generation]
            block.close()
            channel.close()


@pytest.mark.parametrize("is_wrong", [True, False], ids=["its state is wrong", "it cannot be verified"])
def test_a_save_in_memory_that_ranks_gave_up_counts_as_lost_unless_its_state_is_wrong(ranks: Ranks, is_wrong: bool):
    """Lost ones forbid a silent fresh start; those of a wrong state ask for one."""
    (one,) = ranks.start()
    save(one, 1)
    one._writer.link.report_bad([[1, 1]], storage=False, distrusted=is_wrong)
    ranks.workers_die()
    ranks.start_workers()
    if is_wrong:
        assert ranks.load() == [{}]
    else:
        assert ["could not verify" in text for text in ranks.refusals()] == [True]


def test_without_a_telemetry_block_everything_else_works(ranks: Ranks, said):
    """Somebody has cleaned up in /dev/shm."""
    (one,) = ranks.start()
    save(one, 1)
    unlink(telemetry_name(one._writer.link.arena))
    assert save(one, 2)
    ranks.workers_die()
    (one,) = ranks.start_workers()
    assert "cannot report its progress" in said.text
    assert one.load_checkpoint()["step"] == 2
    assert save(one, 3)


def test_wait_does_not_wait_for_a_save_that_a_rank_has_yet_to_make_or_will_never_complete(ranks: Ranks):
    """Whoever writes its part before the other has left, or after."""
    first, second = ranks.start(2)
    for member in (first, second):
        save(member, 1, DISK)
    save(first, 2, DISK)
    assert second.wait_latest_checkpoint(60) == 1
    with pytest.raises(TimeoutError, match="1 checkpoints are not durable"):
        first.wait_latest_checkpoint(0.2)
    second._writer.close()  # which lends nothing
    assert first.wait_latest_checkpoint(10) == 1
    assert save(first, 3, DISK).reason == "rank 1 has closed"
    assert first.wait_latest_checkpoint(10) == 1


def test_a_history_record_is_renewed_during_the_final_flush(ranks: Ranks, directory: Path, monkeypatch):
    """Else another launch would take this job for dead, and begin while it still publishes."""
    monkeypatch.setattr("fastckpt._core.saver.persistence.tenure.RENEWAL", 0.05)
    (member,) = ranks.start()
    assert save(member, 1)
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
