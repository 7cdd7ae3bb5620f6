"""The remote tier: the newest is uploaded in the background and delays nothing of the storage tier."""

import itertools
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fastckpt._core import metrics
from fastckpt._core.config import Settings
from fastckpt._core.memory import slots
from fastckpt._core.saver.persistence import durable_tiers as levels_module
from fastckpt._core.saver.persistence import uploader as upload_module
from fastckpt._core.storage.download_dir import make_staging, staging_path
from fastckpt._core.storage.local import publish as publish_module
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt._core.storage.remote.remote_store import RemoteStore
from fastckpt._core.storage.store import open_store
from fastckpt.ddp import (
    CheckpointDeletionStrategy,
    DdpCheckpointer,
    KeepLatestStepStrategy,
    StorageType,
)
from fastckpt.errors import ConfigError, PersistError
from fastckpt_run.events import summary
from tests.e2e.ddp.conftest import Ranks, directory, ranks, said, state, until  # noqa: F401 (fixtures)
from tests.unit._core.storage.s3 import S3, Fault, s3, s3_server  # noqa: F401 (fixtures)


class Gate:
    """Holds up what is published to one place, until it is opened."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()
        self.error: OSError | None = None
        publish = CheckpointDirectory.publish

        def held(store: CheckpointDirectory, *arguments: Any, **options: Any) -> Any:
            if store.path == place:
                self.entered.release()
                assert self.open.wait(60)
                if self.error:
                    raise PersistError(str(self.error))
            return publish(store, *arguments, **options)

        monkeypatch.setattr(CheckpointDirectory, "publish", held)


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    """Another directory serves as well as a URL."""
    return tmp_path / "remote"


@pytest.fixture
def gate(remote: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(remote, monkeypatch)
    yield made
    made.open.set()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_module, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(upload_module, "LONGEST_PAUSE", 0.1)
    monkeypatch.setattr(upload_module, "AT_THE_END", 0.5)


def steps(place: Path | str) -> list[int]:
    return sorted(stored.id.step for stored in CheckpointDirectory(place).checkpoints())


def save(member: DdpCheckpointer, *which: int) -> Any:
    for step in which:
        result = member.save_checkpoint(step, state(step), storage_type=StorageType.DISK)
        assert result.saved
        assert member.wait_latest_checkpoint(60) == step
    return result


def test_the_newest_checkpoint_is_uploaded_and_the_end_waits_for_it(ranks, remote):  # noqa: F811
    (member,) = ranks.start(remote=remote)
    save(member, 1)
    member.save_checkpoint(2, state(2), storage_type=StorageType.MEMORY)
    ranks.end()
    assert steps(ranks.directory) == [1, 2]
    assert steps(remote)[-1] == 2
    newest = CheckpointDirectory(remote).checkpoints()[0]
    CheckpointDirectory(remote).verify(newest)
    assert newest.manifest.files == CheckpointDirectory(ranks.directory).checkpoints()[0].manifest.files


def test_checkpoints_superseded_before_their_upload_are_not_uploaded(ranks, remote, gate):  # noqa: F811
    (member,) = ranks.start(remote=remote)
    save(member, 1)
    assert gate.entered.acquire(timeout=60)
    save(member, 2, 3, 4)
    gate.open.set()
    ranks.end()
    assert steps(ranks.directory) == [1, 2, 3, 4]
    assert steps(remote) == [1, 4]


def test_each_tier_keeps_what_its_retention_policy_keeps(ranks, remote, gate):  # noqa: F811
    """And the first level does not delete what is on its way to the second."""
    keep = KeepLatestStepStrategy(1, ranks.directory), KeepLatestStepStrategy(2, remote)
    (member,) = ranks.start(deletion_strategy=keep[0], remote=remote, remote_deletion_strategy=keep[1])
    save(member, 1)
    assert gate.entered.acquire(timeout=60)
    save(member, 2, 3)
    until(lambda: steps(ranks.directory) == [1, 3], "what is on its way, and the newest")
    gate.open.set()
    until(lambda: steps(remote) == [1, 3], "1 and 3 in the remote store")
    save(member, 4)
    until(lambda: steps(remote) == [3, 4], "3 and 4 in the remote store")
    ranks.end()
    assert steps(ranks.directory) == [4]


@pytest.mark.parametrize(("verify", "tiers"), [("resume", 0), ("always", 2)])
def test_verify_always_reads_back_checkpoints_of_both_tiers(ranks, remote, monkeypatch, verify, tiers):  # noqa: F811
    read, read_back = set(), publish_module._read_back
    monkeypatch.setattr(publish_module, "_read_back", lambda path, digest: read.add(path) or read_back(path, digest))
    (member,) = ranks.start(remote=remote, verify=verify)
    save(member, 1)
    ranks.end()
    assert steps(remote) == [1]
    assert len({place for place in (ranks.directory, remote) for path in read if place in path.parents}) == tiers


def test_a_failing_upload_is_reported_and_delays_nothing(ranks, remote, gate, said):  # noqa: F811
    gate.error = OSError("no route")
    gate.open.set()
    (member,) = ranks.start(remote=remote)
    failures = metrics.counts["upload_failures"]
    save(member, 1, 2)
    until(lambda: metrics.counts["upload_failures"] >= failures + 3, "retries")
    assert "the remote store is behind" in save(member, 3).trouble
    assert steps(ranks.directory) == [1, 2, 3]
    gate.error = None
    until(lambda: steps(remote) == [3], "the newest alone, once it can")
    later = itertools.count(4)
    until(lambda: save(member, next(later)).trouble == "", "no trouble any more")
    ranks.end()


def test_a_job_ends_despite_failing_uploads_and_the_next_job_catches_up(ranks, remote, gate, said):  # noqa: F811
    gate.error = OSError("no route")
    gate.open.set()
    (member,) = ranks.start(remote=remote)
    save(member, 1)
    saver = ranks.saver
    ranks.end()
    assert "the newest checkpoint is not in" in said.text
    assert "The next job uploads it." in said.text
    assert steps(remote) == []
    summary.report(saver.report(), Settings(summary="full"))
    none = rf"  remote       {remote}: 0 checkpoints uploaded; none is known to be there\n"
    assert re.search(rf"{none}  failed       \d+ uploads, the last one: no route\n  not remote   step 1 of", said.text)
    gate.error = None
    ranks.start(remote=remote)
    until(lambda: steps(remote) == [1], "what the job before could not upload")
    saver = ranks.saver
    ranks.end()
    summary.report(saver.report(), Settings(summary="full"))
    assert f"  remote       {remote}: 1 checkpoint uploaded; the newest there is step 1 of history 1\n" in said.text


def test_the_end_logs_at_once_which_upload_it_waits_for(ranks, remote, gate, said, monkeypatch):  # noqa: F811
    monkeypatch.setattr(levels_module, "NOTICES", (0.01,))
    monkeypatch.setattr(levels_module, "NOTICE_INTERVAL", 0.1)
    (member,) = ranks.start(remote=remote)
    save(member, 1)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(ranks.end)
        words = f"the end of the job waits: step 1 of history 1 is on its way to {remote}. "
        until(lambda: said.text.count(words) > 1, "more than one line")
        gate.open.set()
        ended.result(60)
    assert re.search(r"(600|59\d) s are left \(--fast-flush-timeout\)", said.text)
    assert steps(remote) == [1]


def test_bytes_that_changed_on_the_disk_are_not_uploaded(ranks, remote, gate, said):  # noqa: F811
    (member,) = ranks.start(remote=remote)
    save(member, 1)
    assert gate.entered.acquire(timeout=60)
    with (Path(ranks.directory) / "checkpoint-1/model.pt").open("r+b") as file:
        file.seek(2000)
        file.write(b"flipped")
    gate.open.set()
    until(lambda: "it was" in said.text and "is damaged" in said.text, "the damage in the log")
    assert steps(remote) == []
    save(member, 2)
    until(lambda: steps(remote) == [2], "the next one")
    ranks.end()


@pytest.mark.parametrize(
    ("lost", "step", "tier"),
    [
        ("nothing", 2, "storage"),
        ("the directory", 2, "remote"),
        ("the newest", 2, "remote"),
        ("the remote", 2, "storage"),
    ],
)
def test_resume_prefers_the_newest_step_and_then_the_nearest_tier(ranks, remote, lost, step, tier):  # noqa: F811
    (member,) = ranks.start(remote=remote)
    save(member, 1, 2)
    ranks.end()
    gone = {
        "nothing": [],
        "the directory": [Path(ranks.directory)],
        "the newest": [Path(ranks.directory) / "checkpoint-2"],
        "the remote": [remote],
    }
    for path in gone[lost]:
        shutil.rmtree(path)
    (member,) = ranks.start(remote=remote)
    assert ranks.load()[0]["step"] == step
    assert member.loaded_from == tier
    save(member, 3)
    ranks.end()
    assert steps(remote)[-1] == 3
    ids = [stored.id for stored in CheckpointDirectory(remote).checkpoints()]
    assert ids[0].history > 1, "a new history, though its directory knew of none"


class OfAUser(CheckpointDeletionStrategy):
    def clean_up(self, step: int, delete_func: Callable[[str], None]) -> None:
        pass


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint_dir": "s3://bucket/run", "remote": "s3://bucket/copy"},
        {"remote": "."},
        {"remote_deletion_strategy": KeepLatestStepStrategy(2, ".")},
        {"remote": "s3://bucket/copy", "remote_deletion_strategy": OfAUser()},
    ],
)
def test_invalid_remote_locations_are_refused(tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="remote"):
        DdpCheckpointer(**{"checkpoint_dir": ".", **options})


# --- over a network


@pytest.fixture
def on_s3(s3: S3, ranks: Ranks) -> Ranks:  # noqa: F811
    ranks.directory = "s3://bucket/run"
    return ranks


def newest_at(url: str) -> int:
    store = open_store(url)
    try:
        return max((stored.id.step for stored in store.checkpoints()), default=0)
    finally:
        store.close()


def test_memory_is_resumed_while_the_remote_store_is_gone(on_s3, s3):  # noqa: F811
    for member in on_s3.start(2):
        member.prepare(state(1))
    on_s3.together(lambda member, _: member.save_checkpoint(1, state(1), storage_type=StorageType.DISK))
    on_s3.members[0].wait_latest_checkpoint(60)
    on_s3.together(lambda member, _: member.save_checkpoint(2, state(2), storage_type=StorageType.MEMORY))
    on_s3.workers_die()
    until(lambda: newest_at("s3://bucket/run") == 2, "the flush")
    s3.inject(Fault("drop", times=10**6))
    on_s3.start_workers(2)
    assert [loaded["step"] for loaded in on_s3.load()] == [2, 2]
    assert on_s3.members[1].loaded_from == "memory"
    s3.proxy.faults.clear()
    on_s3.end()


def test_bad_memory_does_not_hide_the_newest_in_the_remote_store(on_s3):
    """What memory holds besides is older."""
    on_s3.start()
    save(on_s3.members[0], 1, 2)
    arena = on_s3.members[0]._writer.link.arena
    newest = next(slot for slot in arena.glob("slot-*") if slots.read(slot).committed == (1, 2))
    until(lambda: slots.read(newest).digests, "the digests")
    with (newest / "model.pt").open("r+b") as image:
        image.seek(3000)
        image.write(b"\xff")
    on_s3.workers_die()
    on_s3.start_workers()
    assert on_s3.load()[0]["step"] == 2
    assert on_s3.members[0].loaded_from == "storage"
    on_s3.end()


def test_downloaded_files_are_removed_after_the_load(on_s3, tmp_path, monkeypatch):
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (member,) = on_s3.start()
    save(member, 1, 2)
    on_s3.end()
    for path, step in (("", 2), ("s3://bucket/run/checkpoint-1", 1)):
        on_s3.start()
        assert on_s3.load(path)[0]["step"] == step
        assert not list(tmp_path.glob("*-staging"))
        on_s3.end()


def test_a_checkpoint_with_an_upload_is_found_by_the_paths_of_both(on_s3):
    (member,) = on_s3.start()
    member.save_checkpoint(1, state(1), "best/model.pt", StorageType.DISK)
    save(member, 2)
    for path in ("checkpoint-1", "best/model.pt"):
        assert on_s3.load(f"s3://bucket/run/{path}")[0]["step"] == 1
    on_s3.end()


def test_files_downloaded_of_a_bad_checkpoint_are_removed_before_the_next(on_s3, s3, tmp_path, monkeypatch):  # noqa: F811
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (member,) = on_s3.start()
    save(member, 1, 2)
    on_s3.end()
    bad = next(key for key in s3.objects() if "checkpoint-2/" in key and key.endswith("rank_0.pt"))
    s3.fs.pipe_file(bad, bytes(s3.objects()[bad]))
    there, fetch = set(), RemoteStore.fetch

    def look_and_fetch(store: RemoteStore, stored: Any, *arguments: Any, **options: Any) -> None:
        there.update((stored.id.step, path.parent.name) for path in tmp_path.glob("*-staging/*/model.pt"))
        fetch(store, stored, *arguments, **options)
        there.update((stored.id.step, path.parent.name) for path in tmp_path.glob("*-staging/*/model.pt"))

    monkeypatch.setattr(RemoteStore, "fetch", look_and_fetch)
    on_s3.start()
    assert on_s3.load()[0]["step"] == 1
    assert {(1, "1-1"), (2, "1-2")} <= there and (1, "1-2") not in there
    on_s3.end()


def test_downloads_of_killed_readers_are_removed_by_the_next_launch(ranks):  # noqa: F811
    (member,) = ranks.start()
    left = staging_path(member._writer.link.arena)
    ranks.end()
    (left / "1-1").mkdir(parents=True)
    (left / "1-1/model.pt").touch()
    ranks.start()
    assert not left.exists()
    ranks.end()


@pytest.mark.parametrize("mode", [0o755, "a link"])
def test_a_download_directory_that_is_not_private_is_refused(tmp_path, mode):
    place = tmp_path / "place"
    if mode == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.mkdir()
        place.chmod(mode)
    with pytest.raises(PersistError, match=r"not a private directory|cannot download"):
        make_staging(place)


def test_a_bad_remote_object_makes_all_ranks_fall_back_and_is_quarantined(on_s3, s3):  # noqa: F811
    on_s3.start(2)
    for step in (1, 2):
        on_s3.together(
            lambda member, _, step=step: member.save_checkpoint(step, state(step), storage_type=StorageType.DISK)
        )
        on_s3.members[0].wait_latest_checkpoint(60)
    on_s3.end()
    bad = next(key for key in s3.objects() if "checkpoint-2/" in key and key.endswith("rank_1.pt"))
    content = s3.fs.cat_file(bad)
    s3.fs.pipe_file(bad, content[:-1] + bytes([content[-1] ^ 1]))
    on_s3.start(2)
    assert [loaded["step"] for loaded in on_s3.load()] == [1, 1]
    on_s3.end()
    assert bad.replace("rank_1.pt", "why.txt") in s3.objects()
    on_s3.start(2)
    assert [loaded["step"] for loaded in on_s3.load()] == [1, 1]
    on_s3.end()


@pytest.mark.parametrize("near", ["something", "nothing"])
def test_a_remote_store_unreachable_at_the_start_does_not_block_the_job(ranks, s3, near, said):  # noqa: F811
    url = "s3://bucket/copy"
    (member,) = ranks.start(remote=url)
    save(member, 1)
    ranks.end()
    assert newest_at(url) == 1
    s3.inject(Fault(403, times=10**6))
    if near == "nothing":
        shutil.rmtree(ranks.directory)
        with pytest.raises(PersistError, match="cannot read checkpoints in s3://bucket/copy"):
            ranks.start(remote=url)
        ranks.end()
        return
    (member,) = ranks.start(remote=url)
    assert ranks.load()[0]["step"] == 1
    assert (member.loaded_from, member._writer.link.history > 1000) == ("storage", True)
    save(member, 2)
    s3.proxy.faults.clear()
    until(lambda: newest_at(url) == 2, "what was saved meanwhile")
    ranks.end()
