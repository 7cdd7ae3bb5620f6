"""Damage of every kind is found, named, and quarantined with its reason; nothing loads, deletes or loses it."""

import os
import re
import shutil
from datetime import UTC, datetime, timedelta

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt.errors import BadCheckpoint, ConfigError, PersistError
from tests.cli import harm
from tests.support.other_users import as_nobody
from tests.unit._core.storage.checkpoints import assert_clean, assert_sound, ids, publish

OLD, BAD, NEWER = SaveId(0, 5), SaveId(1, 6), SaveId(2, 6)


@pytest.fixture
def place(directory):
    """The place of the newer of two checkpoints."""
    publish(directory, OLD)
    publish(directory, BAD)
    return directory.path / "checkpoint-6"


def garble(path):
    path.write_bytes(os.urandom(500))


@pytest.mark.parametrize("name", ["rank_0.pt", "manifest.json"])
def test_damage_that_a_look_shows_does_not_count_and_stays_for_a_person_to_look_at(directory, place, name):
    path, kept = place / name, directory.path.parent / "kept"
    of_manifests = [harm.flip, harm.truncate, harm.empty, harm.directory_instead, garble]
    for damage in of_manifests if name == "manifest.json" else harm.ALL[1:]:
        shutil.copytree(place, kept)
        damage(path)
        assert ids(directory) == [OLD], damage
        [(found, why)] = directory.scan().damaged
        assert found == place and str(path) in why
        assert name != "rank_0.pt" or re.search(r"\d+ (bytes|were saved)", why)
        directory.sweep()
        assert directory.scan().damaged == [(place, why)]
        shutil.rmtree(place)
        kept.rename(place)
    damage(path)
    publish(directory, SaveId(1, 7))
    assert ids(directory) == [(1, 7), OLD]


@pytest.mark.parametrize("name", ["model.pt", "rank_0.pt"])
def test_a_flipped_bit_or_a_missing_file_is_found_by_verify(directory, place, name):
    newest, path = directory.checkpoints()[0], place / name
    harm.flip(path)
    assert ids(directory) == [BAD, OLD]  # a scan looks at sizes only
    directory.verify(newest, ["rank_0.pt" if name == "model.pt" else "model.pt"])
    for names in (None, [name]):
        with pytest.raises(BadCheckpoint, match=f"{path} is damaged: .* [0-9a-f]{{32}}; [0-9a-f]{{32}} was saved"):
            directory.verify(newest, names)
    with pytest.raises(BadCheckpoint, match="no file 'other'"):
        directory.verify(newest, ["other"])
    path.unlink()
    with pytest.raises(BadCheckpoint, match=rf"{name} of \d+ bytes is not there"):
        directory.verify(newest, [name])


def test_what_this_user_may_not_read_is_an_error_and_not_damaged_or_empty(directory, place, fast_path):
    newest = directory.checkpoints()[0]
    fast_path.chmod(0o755)
    (place / "model.pt").chmod(0)
    with as_nobody(), pytest.raises(PersistError, match=r"Permission denied.*Give this user the right"):
        directory.verify(newest, ["model.pt"])
    for part in (".", ".fastckpt"):
        (directory.path / part).chmod(0)
        with as_nobody(), pytest.raises(PersistError, match="Permission denied"):
            directory.checkpoints()
        (directory.path / part).chmod(0o755)


def test_a_checkpoint_without_its_manifest_or_in_another_steps_directory_does_not_count(directory, place):
    """The former is reported where it looks like one of ours, but it is not moved: it may be another tool's."""
    (place / "manifest.json").unlink()
    shutil.copytree(directory.path / "checkpoint-5", directory.path / "checkpoint-9")
    assert ids(directory) == [OLD]
    damaged = dict(directory.scan().damaged)
    assert damaged.keys() == {place, directory.path / "checkpoint-9"}
    assert "has no manifest" in damaged[place] and "belongs in" in damaged[directory.path / "checkpoint-9"]
    with pytest.raises(PersistError, match="may be another tool's, and is not moved"):
        directory.quarantine(place, damaged[place])
    assert place.is_dir()


# --- quarantine


def content(place):
    return {path.name: path.read_bytes() for path in place.iterdir() if path.name != "why.txt"}


def test_a_quarantined_checkpoint_does_not_count_and_its_files_are_never_deleted(directory, place):
    before = content(place)
    directory.quarantine(directory.checkpoints()[0], "first").rename(place)
    assert assert_sound(directory) == [BAD, OLD]  # who moves it back has it back
    aside = directory.quarantine(directory.checkpoints()[0], "model.pt is\nbad")
    assert re.fullmatch(r"quarantine-1-6-[0-9a-f]{12}", aside.name)
    assert content(aside) == before and not place.exists()
    assert assert_sound(directory) == [OLD]
    assert directory.scan().quarantined == [(aside, "model.pt is bad")]
    why = (aside / "why.txt").read_text()
    assert f"from: {place}\n" in why and "move this directory back" in why
    when = datetime.fromisoformat(why.split()[1])
    assert timedelta(0) <= datetime.now(UTC) - when < timedelta(minutes=5)
    directory.delete(BAD)
    for id in (BAD, NEWER, SaveId(3, 7)):
        publish(directory, id)
    directory.delete(NEWER)
    directory.sweep()
    assert content(aside) == before and [path for path, _ in directory.scan().quarantined] == [aside]
    with pytest.raises(ConfigError, match="part of a checkpoint"):
        publish(directory, SaveId(4, 8), str(aside / "model.pt"))


@pytest.mark.parametrize("name", ["manifest.json", "model.pt"])
def test_a_checkpoint_that_a_scan_finds_damaged_is_quarantined_also_when_its_step_is_saved_again(
    directory, place, name
):
    os.truncate(place / name, 10)
    before = content(place)
    [(path, why)] = directory.scan().damaged
    aside = directory.quarantine(path, why)
    assert aside.name.startswith("quarantine-1-6-" if name == "model.pt" else "quarantine-checkpoint-6-")
    scan = directory.scan()
    assert (scan.damaged, scan.quarantined) == ([], [(aside, why)])
    aside.rename(place)
    publish(directory, NEWER)
    assert assert_sound(directory) == [NEWER, OLD]
    [(aside, why)] = directory.scan().quarantined
    assert content(aside) == before and name in why
    assert_clean(directory)
    for gone in (path, directory.path / "checkpoint-77"):
        with pytest.raises(PersistError, match="another checkpoint took its place"):
            directory.quarantine(gone, "it was bad")
    assert assert_sound(directory) == [NEWER, OLD]


@pytest.mark.parametrize("lost", [True, False])
def test_a_file_at_a_path_of_the_user_is_not_moved_by_quarantine(directory, place, fast_path, lost):
    target = fast_path / "mine.pt"
    publish(directory, NEWER, str(target))
    bad = directory.checkpoints()[0]
    if lost:
        target.write_bytes(b"overwritten")
        [(bad, _)] = directory.scan().damaged
        assert bad == place
    aside = directory.quarantine(bad, "it is bad")
    assert target.exists() and f"file: {target} (left" in (aside / "why.txt").read_text()
    assert aside.name.startswith("quarantine-2-6-") and (aside / "rank_0.pt").exists()
    assert directory.scan().damaged == [] and assert_sound(directory) == [OLD]


def test_a_quarantine_of_a_checkpoint_that_was_replaced_or_that_storage_refuses_changes_nothing(
    directory, place, fast_path
):
    bad = directory.checkpoints()[0]
    publish(directory, NEWER)
    with pytest.raises(PersistError, match="another checkpoint took its place"):
        directory.quarantine(bad, "it was bad")
    bad = directory.checkpoints()[0]
    fast_path.chmod(0o755)
    (directory.path / ".fastckpt/writers").touch(0o666)
    directory.path.chmod(0o555)
    refused = r"cannot quarantine step 6 of history 2 .*(Permission denied|not permit)"
    with as_nobody(), pytest.raises(PersistError, match=refused):
        CheckpointDirectory(directory.path).quarantine(bad, "it is bad")
    directory.path.chmod(0o700)
    assert assert_sound(directory) == [NEWER, OLD]
