"""A history has one holder, of however many that open it at once."""

import errno
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.io.directory_root import DirectoryRoot
from fastckpt._core.storage.history import Record
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt._core.storage.remote.objects import Creation
from fastckpt._core.storage.remote.remote_store import RemoteStore
from fastckpt._core.storage.store import Store, open_store
from fastckpt.errors import ConfigError, PersistError
from tests.unit._core.storage.checkpoints import ids, images, publish
from tests.unit._core.storage.conftest import at_once
from tests.unit._core.storage.local.test_identity import links_refused
from tests.unit._core.storage.s3 import S3, Fault


@pytest.fixture(params=["directory", "without links", "s3", "files", "directories"])
def location(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_server: str) -> str:
    if request.param == "s3":
        request.getfixturevalue("s3")
        return "s3://bucket/run1"
    if request.param == "without links":
        links_refused(monkeypatch, errno.EOPNOTSUPP)
    if request.param == "directories":
        monkeypatch.setattr("fastckpt._core.storage.remote.objects.Objects.creation", Creation.DIRECTORY)
    return f"plain://{tmp_path}/run" if request.param in ("files", "directories") else str(tmp_path / "run")


@pytest.fixture
def store(location: str) -> Iterator[Store]:
    made = open_store(location)
    yield made
    made.close()


def record(history: int = 1, token: str = "one", **more) -> Record:
    return Record(history, token, "@agent", "/run", {"pid": 7}, ("@agent", "@other"), SaveId(0, 3), "now", **more)


def test_a_history_record_is_read_as_it_was_written_and_renewed_and_an_invalid_one_is_live_while_it_changes(
    store: Store,
) -> None:
    histories = store.histories
    assert histories.excludes and histories.newest() == 0 and histories.read(1) is None
    assert histories.create(record()) and histories.create(record(12))
    assert histories.newest() == 12 and histories.read(1) == record() and histories.read(11) is None
    later = replace(record().renewed(), closed=True, finished=True)
    histories.write(later)
    assert histories.read(1) == later and len(later.to_bytes()) == len(record().to_bytes())
    assert store.checkpoints() == [] and store.sweep() == [], "a record is no remains"
    assert histories.newest() == 12
    seen = set()
    for text in (b" ", b'{"token": 1', b"[]"):
        if isinstance(store, RemoteStore):
            store._objects.put(histories._name(1), text)
        else:
            (store.path / ".fastckpt/history-1").write_bytes(text)
        found = histories.read(1)
        assert found is not None and (found.history, found.token, found.launch, found.closed) == (1, "", "", False)
        seen.add(found.count)
    assert len(seen) == 3 and not histories.create(record())


def test_of_many_processes_that_open_a_history_at_once_one_succeeds(location: str) -> None:
    def act(number: int) -> str:
        made = open_store(location).histories.create(record(token=str(number)))
        return f"{number}" if made else ""

    won = [said for said in at_once(4, act) if said]
    reader = open_store(location)
    found = reader.histories.read(1)
    reader.close()
    assert found is not None and won == [found.token], "also when an answer is heard late, the record tells whose it is"


@pytest.mark.parametrize("location", ["directory", "directories"], indirect=True)
def test_a_sweep_removes_history_records_that_decide_nothing(store: Store, tmp_path: Path) -> None:
    """Those that are older than the newest checkpoint, and of whose histories none is there; the newest all stay."""
    histories = store.histories

    def save(number: int) -> None:
        id = SaveId(number, number)
        store.publish(PublishRequest(id, images(tmp_path / f"images-{number}", id)))

    for number in range(1, 41):
        assert histories.create(record(number))
    store.sweep()
    assert all(histories.read(number) for number in range(1, 41)), "no checkpoint is newer than any of them"
    for history in (3, 20):
        save(history)
    assert len([*store.sweep()]) == 18 and store.sweep() == []
    assert [n for n in range(1, 41) if histories.read(n)] == [3, *range(20, 41)] and histories.newest() == 40
    save(40)
    store.sweep()
    assert [n for n in range(1, 41) if histories.read(n)] == [3, 20, *range(25, 41)], "the newest 16 stay"
    assert [stored.id for stored in store.checkpoints()] == [(40, 40), (20, 20), (3, 3)]


def test_a_job_killed_before_its_record_is_named_has_not_opened_the_history(tmp_path: Path) -> None:
    histories = open_store(tmp_path).histories
    for operation, opened in (("link", None), ("unlink", record())):
        if (child := os.fork()) == 0:
            setattr(os, operation, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
            open_store(tmp_path).histories.create(record())
            os._exit(1)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        assert histories.read(1) == opened
    open_store(tmp_path).sweep()
    assert histories.read(1) == record() and not list(tmp_path.glob(".fastckpt/tmp-*"))


def test_a_renewal_writes_no_record_that_was_removed_nor_to_a_file_of_the_user_of_its_name(tmp_path: Path) -> None:
    thesis, histories = tmp_path / "thesis.tex", open_store(tmp_path / "run").histories
    with pytest.raises(PersistError):
        histories.write(record())
    assert histories.read(1) is None and histories.create(record())
    thesis.write_text("years")
    (path := tmp_path / "run/.fastckpt/history-1").unlink()
    path.hardlink_to(thesis)
    with pytest.raises(PersistError, match="not the record that this launch made"):
        histories.write(record().renewed())
    assert thesis.read_text() == "years"


def test_a_lost_answer_to_a_record_is_recognized_by_its_token_and_a_store_without_conditions_refused(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client asks again, and is told that there is one: by its token it sees that this is its own."""
    fault = s3.inject(Fault("lose", "PUT", "history-1"))
    store = open_store("s3://bucket/run1")
    assert store.histories.create(record()) is False and fault.injected == 1
    assert store.histories.read(1) == record()
    s3.inject(Fault(501, "PUT", "history-2", times=9))
    with pytest.raises(ConfigError, match=r"does not know conditional requests.*--fast-no-exclusive"):
        store.histories.create(record(2))
    store.close()
    store = RemoteStore(f"memory://{tmp_path.name}/run")  # some take a conditional request for any other
    monkeypatch.setattr(store._objects, "_condition", {"mode": "overwrite"})
    with pytest.raises(ConfigError, match=r"makes an object twice.*--fast-no-exclusive"):
        store.histories.create(record())


# --- what two that have lost sight of each other do to one place


def test_a_newer_checkpoint_retired_by_an_older_job_is_restored(directory: CheckpointDirectory) -> None:
    """It came between an older one's look and its rename, and whoever renamed was killed."""
    publish(directory, SaveId(2, 5))
    home = directory.path / "checkpoint-5"
    home.rename(directory.path / ".fastckpt/retired-0123456789ab")
    publish(directory, SaveId(1, 5))
    assert ids(directory)[0] == (2, 5)
    assert home in directory.sweep()
    assert ids(directory) == [(2, 5)] and not list(directory.path.glob(".fastckpt/*-*"))


def test_a_deletion_is_cancelled_if_the_newer_checkpoint_is_gone(
    directory: CheckpointDirectory, fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the check and the deletion it was found bad, say, and quarantined by another process."""
    publish(directory, SaveId(1, 5))
    publish(directory, SaveId(1, 6))
    rename = DirectoryRoot.rename

    def set_aside(self: DirectoryRoot, source: Path, target: Path) -> None:
        if target.name.startswith("retired"):
            (directory.path / "checkpoint-6").rename(fast_path / "bad")
        rename(self, source, target)

    monkeypatch.setattr(DirectoryRoot, "rename", set_aside)
    directory.delete(SaveId(1, 5))
    assert ids(directory) == [(1, 5)]
