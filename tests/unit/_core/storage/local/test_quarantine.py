"""A bad checkpoint is quarantined with its reason; nothing loads or deletes it, and no crash loses it."""

import os
import re
import shutil
from datetime import UTC, datetime, timedelta

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt.errors import ConfigError, PersistError
from tests.unit._core.storage.checkpoints import assert_clean, assert_sound, ids, publish

OLD, BAD, NEW = SaveId(0, 5), SaveId(1, 6), SaveId(2, 6)


@pytest.fixture
def directory(fast_path):
    directory = CheckpointDirectory(fast_path / "dir")
    publish(directory, OLD)
    publish(directory, BAD)
    return directory


def content(place):
    return {path.name: path.read_bytes() for path in place.iterdir() if path.name != "why.txt"}


def test_a_quarantined_checkpoint_does_not_count_and_keeps_its_files(directory):
    place = directory.path / "checkpoint-6"
    before = content(place)
    aside = directory.quarantine(directory.checkpoints()[0], "model.pt is\nbad")
    assert re.fullmatch(r"quarantine-1-6-[0-9a-f]{12}", aside.name)
    assert content(aside) == before and not place.exists()
    assert assert_sound(directory) == [OLD]
    assert directory.scan().quarantined == [(aside, "model.pt is bad")]
    why = (aside / "why.txt").read_text()
    assert f"from: {place}\n" in why and "move this directory back" in why
    when = datetime.fromisoformat(why.split()[1])
    assert timedelta(0) <= datetime.now(UTC) - when < timedelta(minutes=5)


@pytest.mark.parametrize("harm", ["manifest", "model.pt"])
def test_a_checkpoint_that_a_scan_finds_damaged_is_quarantined(directory, harm):
    place = directory.path / "checkpoint-6"
    (place / "manifest.json").write_text("{") if harm == "manifest" else (place / "model.pt").unlink()
    [(path, why)] = directory.scan().damaged
    aside = directory.quarantine(path, why)
    assert aside.name.startswith("quarantine-checkpoint-6-" if harm == "manifest" else "quarantine-1-6-")
    scan = directory.scan()
    assert (scan.damaged, scan.quarantined) == ([], [(aside, why)])
    assert ids(directory) == [OLD]


@pytest.mark.parametrize("lost", [True, False])
def test_a_file_at_a_path_of_the_user_is_not_moved_by_quarantine(directory, fast_path, lost):
    target = fast_path / "mine.pt"
    publish(directory, NEW, str(target))
    bad = directory.checkpoints()[0]
    if lost:
        target.write_bytes(b"overwritten")
        [(bad, _)] = directory.scan().damaged
        assert bad == directory.path / "checkpoint-6"
    aside = directory.quarantine(bad, "it is bad")
    assert target.exists() and f"file: {target} (left" in (aside / "why.txt").read_text()
    assert aside.name.startswith("quarantine-2-6-") and (aside / "rank_0.pt").exists()
    assert directory.scan().damaged == [] and assert_sound(directory) == [OLD]


def test_a_quarantined_checkpoint_is_not_deleted_by_sweep_or_retention(directory, fast_path):
    aside = directory.quarantine(directory.checkpoints()[0], "it is bad")
    before = content(aside)
    directory.sweep()
    directory.delete(BAD)
    publish(directory, BAD)
    publish(directory, NEW)
    publish(directory, SaveId(3, 7))
    directory.delete(NEW)
    directory.sweep()
    assert content(aside) == before and [path for path, _ in directory.scan().quarantined] == [aside]
    with pytest.raises(ConfigError, match="part of a checkpoint"):
        publish(directory, SaveId(4, 8), str(aside / "model.pt"))


def test_a_checkpoint_moved_back_counts_and_can_be_quarantined_again(directory):
    aside = directory.quarantine(directory.checkpoints()[0], "first")
    aside.rename(directory.path / "checkpoint-6")
    assert assert_sound(directory) == [BAD, OLD]
    aside = directory.quarantine(directory.checkpoints()[0], "second")
    assert directory.scan().quarantined == [(aside, "second")]


def test_quarantine_spares_a_checkpoint_published_in_the_same_place(directory):
    bad = directory.checkpoints()[0]
    os.truncate(directory.path / "checkpoint-6/model.pt", 1)
    [(damaged, _)] = directory.scan().damaged
    publish(directory, NEW)
    for gone in (bad, damaged, directory.path / "checkpoint-77"):
        with pytest.raises(PersistError, match="another checkpoint took its place"):
            directory.quarantine(gone, "it was bad")
    assert assert_sound(directory) == [NEW, OLD]


@pytest.mark.parametrize("harm", ["short", "garbled"])
def test_a_new_checkpoint_in_place_of_a_quarantined_one_does_not_delete_it(directory, harm):
    name = {"short": "model.pt", "garbled": "manifest.json"}[harm]
    os.truncate(directory.path / "checkpoint-6" / name, 10)
    before = content(directory.path / "checkpoint-6")
    publish(directory, NEW)
    assert assert_sound(directory) == [NEW, OLD]
    [(aside, why)] = directory.scan().quarantined
    assert content(aside) == before and name in why
    assert_clean(directory)


def test_a_damaged_checkpoint_whose_path_is_reused_is_not_deleted(directory, fast_path):
    target = str(fast_path / "mine.pt")
    publish(directory, NEW, target)
    os.truncate(directory.path / "checkpoint-6/rank_0.pt", 0)
    publish(directory, SaveId(2, 7), target)
    [(aside, why)] = directory.scan().quarantined
    assert aside.name.startswith("quarantine-2-6-") and "rank_0.pt has 0 bytes" in why
    assert assert_sound(directory) == [(2, 7), OLD]


def test_a_quarantine_killed_at_any_file_operation_loses_nothing(fast_path, crash):
    operation = 0
    while True:
        operation += 1
        directory = CheckpointDirectory(fast_path / str(operation) / "dir")
        publish(directory, OLD)
        publish(directory, BAD)
        before = content(directory.path / "checkpoint-6")
        killed = crash(directory, "quarantine", BAD, operation=operation)
        directory.sweep()
        asides = directory.scan().quarantined
        if ids(directory) == [BAD, OLD]:
            assert asides == []
            asides = [(directory.quarantine(directory.checkpoints()[0], "it is bad"), "it is bad")]
        [(aside, why)] = asides
        assert (content(aside), why) == (before, "it is bad") and assert_sound(directory) == [OLD]
        if not killed:
            break
        shutil.rmtree(directory.path.parent)
    assert operation > 5


def test_a_quarantine_that_storage_refuses_changes_nothing(directory, fast_path):
    fast_path.chmod(0o755)
    bad = directory.checkpoints()[0]
    (directory.path / ".fastckpt/writers").touch(0o666)
    directory.path.chmod(0o555)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        with pytest.raises(
            PersistError, match=r"cannot quarantine step 6 of history 1 .*(Permission denied|not permit)"
        ):
            CheckpointDirectory(directory.path).quarantine(bad, "it is bad")
    finally:
        if root:
            os.seteuid(0)
        directory.path.chmod(0o700)
    assert assert_sound(directory) == [BAD, OLD]
