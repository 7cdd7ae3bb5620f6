"""The remote tier: the newest is uploaded in the background and delays nothing of the storage tier."""

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fastckpt._core import metrics
from fastckpt._core.saver.persistence import durable_tiers as levels_module
from fastckpt._core.saver.persistence import uploader as upload_module
from fastckpt._core.storage.download_dir import make_staging, staging_path
from fastckpt._core.storage.local import publish as publish_module
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt._core.storage.remote.remote_store import RemoteStore
from fastckpt.ddp import CheckpointDeletionStrategy, DdpCheckpointer, KeepLatestStepStrategy, StorageType
from fastckpt.errors import ConfigError, PersistError
from tests.e2e.ddp.conftest import Ranks, on_storage, state, until
from tests.unit._core.saver.peers.agents import flip
from tests.unit._core.saver.persistence.files_at_url import FilesAtUrl, newest_at, place_of, url_of_files  # noqa: F401

DISK, MEMORY = StorageType.DISK, StorageType.MEMORY


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


def save(member: DdpCheckpointer, *which: int) -> Any:
    for step in which:
        result = member.save_checkpoint(step, state(step), storage_type=DISK)
        assert result.saved
        assert member.wait_latest_checkpoint(60) == step
    return result


def test_the_newest_checkpoint_is_uploaded_and_the_end_waits_for_it(ranks, remote, gate, said, monkeypatch):
    """And logs at once what it waits for. Checkpoints of both tiers are read back if that is asked for."""
    monkeypatch.setattr(levels_module, "NOTICES", (0.01,))
    monkeypatch.setattr(levels_module, "NOTICE_INTERVAL", 0.1)
    read, read_back = set(), publish_module._read_back
    monkeypatch.setattr(publish_module, "_read_back", lambda path, digest: read.add(path) or read_back(path, digest))
    (member,) = ranks.start(remote=remote, verify="always")
    save(member, 1)
    member.save_checkpoint(2, state(2), storage_type=MEMORY)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(ranks.end)
        until(lambda: f"is on its way to {remote}. " in said.text, "what the end waits for")
        gate.open.set()
        ended.result(60)
    assert "the end of the job waits: " in said.text and "s are left (--fast-flush-timeout)" in said.text
    assert on_storage(ranks.directory) == [1, 2] and on_storage(remote)[-1] == 2
    newest = CheckpointDirectory(remote).checkpoints()[0]
    CheckpointDirectory(remote).verify(newest)
    assert newest.manifest.files == CheckpointDirectory(ranks.directory).checkpoints()[0].manifest.files
    assert len({place for place in (ranks.directory, remote) for path in read if place in path.parents}) == 2


def test_checkpoints_superseded_or_damaged_before_their_upload_are_not_uploaded_and_each_tier_keeps_its_own(
    ranks, remote, gate, said
):
    """And the first level does not delete what is on its way to the second."""
    keep = KeepLatestStepStrategy(1, ranks.directory), KeepLatestStepStrategy(2, remote)
    (member,) = ranks.start(deletion_strategy=keep[0], remote=remote, remote_deletion_strategy=keep[1])
    save(member, 1)
    assert gate.entered.acquire(timeout=60)
    flip(ranks.directory / "checkpoint-1/model.pt", 2000)
    save(member, 2, 3)
    until(lambda: on_storage(ranks.directory) == [1, 3], "what is on its way, and the newest")
    assert on_storage(remote) == []
    gate.open.set()
    until(lambda: "it was" in said.text and "is damaged" in said.text, "the damage in the log")
    for uploaded in ([3], [3, 4], [4, 5]):
        if uploaded != [3]:
            save(member, uploaded[-1])
        until(lambda expected=uploaded: on_storage(remote) == expected, f"{uploaded} in the remote store")
    ranks.end()
    assert on_storage(ranks.directory) == [5]


def test_a_job_ends_despite_failing_uploads_and_the_next_job_catches_up(ranks, remote, gate, said):
    gate.error = OSError("no route")
    gate.open.set()
    (member,) = ranks.start(remote=remote)
    failures = metrics.counts["upload_failures"]
    save(member, 1, 2)
    until(lambda: metrics.counts["upload_failures"] >= failures + 3, "retries")
    assert "the remote store is behind" in save(member, 3).trouble
    ranks.end()
    assert "the newest checkpoint is not in" in said.text and "The next job uploads it." in said.text
    assert on_storage(remote) == [] and on_storage(ranks.directory) == [1, 2, 3]
    gate.error = None
    ranks.start(remote=remote)
    until(lambda: on_storage(remote) == [3], "what the job before could not upload")
    ranks.end()


class OfAUser(CheckpointDeletionStrategy):
    def clean_up(self, step: int, delete_func: Callable[[str], None]) -> None:
        pass


def test_invalid_remote_locations_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options: list[dict[str, Any]] = [
        {"remote": "."},
        {"remote_deletion_strategy": KeepLatestStepStrategy(2, ".")},
        {"remote": "s3://bucket/copy", "remote_deletion_strategy": OfAUser()},
    ]
    for each in options:
        with pytest.raises(ConfigError, match="remote"):
            DdpCheckpointer(".", **each)


# --- at a URL


@pytest.fixture
def at_url(url: str, ranks: Ranks) -> Ranks:
    ranks.directory = url  # type: ignore[assignment]
    return ranks


def together(ranks: Ranks, step: int, kind: StorageType) -> None:
    ranks.together(lambda member, _: member.save_checkpoint(step, state(step), storage_type=kind))
    if kind is DISK:
        ranks.members[0].wait_latest_checkpoint(60)


def test_a_checkpoint_with_an_upload_is_found_by_its_paths_and_downloads_are_removed_after_the_load(
    at_url, url, tmp_path, monkeypatch
):
    """Also those of killed readers, by the next launch."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (member,) = at_url.start()
    member.save_checkpoint(1, state(1), "best/model.pt", DISK)
    save(member, 2)
    left = staging_path(member._writer.link.arena)
    at_url.end()
    (left / "1-1").mkdir(parents=True)
    (left / "1-1/model.pt").touch()
    at_url.start()
    assert not left.exists()
    for path, step in (("", 2), (f"{url}/checkpoint-1", 1), (f"{url}/best/model.pt", 1)):
        assert at_url.load(path)[0]["step"] == step
        assert not list(tmp_path.glob("*-staging"))
    at_url.end()


def test_a_download_directory_that_is_not_private_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "open").mkdir(mode=0o755)
    for name in ("link", "open"):
        with pytest.raises(PersistError, match=r"not a private directory|cannot download"):
            make_staging(tmp_path / name)


def test_a_bad_remote_object_makes_all_ranks_fall_back_and_is_quarantined(at_url, url, tmp_path, monkeypatch):
    """What was downloaded of it is removed before the next is."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    at_url.start(2)
    for step in (1, 2):
        together(at_url, step, DISK)
    at_url.end()
    (bad,) = place_of(url).rglob("checkpoint-2/**/rank_1.pt")
    flip(bad, bad.stat().st_size - 1)
    there, fetch = set(), RemoteStore.fetch

    def look_and_fetch(store: RemoteStore, stored: Any, *arguments: Any, **options: Any) -> None:
        for act in (lambda: None, lambda: fetch(store, stored, *arguments, **options)):
            act()
            there.update((stored.id.step, path.parent.name) for path in tmp_path.glob("*-staging/*/model.pt"))

    monkeypatch.setattr(RemoteStore, "fetch", look_and_fetch)
    at_url.start(2)
    assert [loaded["step"] for loaded in at_url.load()] == [1, 1]
    assert {(1, "1-1"), (2, "1-2")} <= there and (1, "1-2") not in there
    assert bad.with_name("why.txt").exists()
    assert [loaded["step"] for loaded in at_url.load()] == [1, 1]
    at_url.end()


def test_a_remote_store_unreachable_at_the_start_does_not_block_the_job(ranks, url):
    """Unless there is no other checkpoint."""
    (member,) = ranks.start(remote=url)
    save(member, 1)
    ranks.end()
    assert newest_at(url) == 1
    FilesAtUrl.refuse()
    (member,) = ranks.start(remote=url)
    assert ranks.load()[0]["step"] == 1
    assert (member.loaded_from, member._writer.link.history > 1000) == ("storage", True)
    save(member, 2)
    FilesAtUrl.refuse(times=0)
    until(lambda: newest_at(url) == 2, "what was saved meanwhile")
    ranks.end()
    FilesAtUrl.refuse()
    shutil.rmtree(ranks.directory)
    with pytest.raises(PersistError, match=f"cannot read checkpoints in {url}"):
        ranks.start(remote=url)
    ranks.end()
