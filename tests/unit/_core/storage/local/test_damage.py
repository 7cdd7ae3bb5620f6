"""Damage of every kind is found, named, and quarantined with its reason; nothing loads, deletes or loses it."""

import os
import re
import shutil
from datetime import UTC, datetime, timedelta

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt.errors import BadCheckpoint, ConfigError, PersistError
from tests.unit._core.storage.checkpoints import assert_clean, assert_sound, ids, publish
from tests.unit._core.storage.conftest import as_nobody

OLD, NEW = SaveId(0, 5), SaveId(0, 6)
BAD, NEWER = SaveId(1, 6), SaveId(2, 6)


@pytest.fixture(params=["default", "target"])
def newest(request, directory, fast_path):
    """The newer of two checkpoints."""
    publish(directory, OLD)
    publish(directory, NEW, str(fast_path / "user.pt") if request.param == "target" else "")
    return directory.checkpoints()[0]


def flip(path):
    text = bytearray(path.read_bytes())
    text[text.index(b'"step": ') + 8] ^= 1
    path.write_bytes(text)


HARMS = {
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "empty": lambda path: os.truncate(path, 0),
    "gone": lambda path: path.unlink(),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "a link to nothing": lambda path: (path.unlink(), path.symlink_to("nowhere")),
    "garbled": lambda path: path.write_bytes(os.urandom(500)),
    "flipped": flip,
}


@pytest.mark.parametrize("name", ["model.pt", "rank_0.pt"])
@pytest.mark.parametrize("harm", [*HARMS][:6])
def test_files_of_another_size_do_not_count(directory, newest, name, harm):
    path = newest.path_of(name)
    HARMS[harm](path)
    assert ids(directory) == [OLD]
    [(_, why)] = directory.scan().damaged
    assert str(path) in why and re.search(r"\d+ (bytes|were saved)", why)
    directory.sweep()
    assert [why for _, why in directory.scan().damaged] == [why]  # bad ones are kept for a person to look at


@pytest.mark.parametrize("harm", ["half", "empty", "garbled", "flipped", "a directory"])
def test_a_damaged_manifest_is_reported(directory, newest, harm):
    manifest = newest.place / "manifest.json"
    HARMS[harm](manifest)
    assert ids(directory) == [OLD]
    [(path, why)] = directory.scan().damaged
    assert path == manifest.parent and str(manifest) in why
    publish(directory, SaveId(0, 7))
    assert ids(directory) == [(0, 7), OLD]


@pytest.mark.parametrize("name", ["model.pt", "rank_0.pt"])
def test_a_flipped_bit_or_a_missing_file_is_found_by_verify(directory, newest, name):
    path = newest.path_of(name)
    times = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a disk does it, which tells nobody
    assert ids(directory) == [NEW, OLD]  # a scan looks at sizes only
    directory.verify(newest, ["rank_0.pt" if name == "model.pt" else "model.pt"])
    with pytest.raises(BadCheckpoint, match=f"{path} is damaged: .* [0-9a-f]{{32}}; [0-9a-f]{{32}} was saved"):
        directory.verify(newest)
    with pytest.raises(BadCheckpoint, match="is damaged"):
        directory.verify(newest, [name])
    with pytest.raises(BadCheckpoint, match="no file 'other'"):
        directory.verify(newest, ["other"])
    path.unlink()
    with pytest.raises(BadCheckpoint, match=rf"{name} of \d+ bytes is not there"):
        directory.verify(newest, [name])


def test_what_this_user_may_not_read_is_an_error_and_not_damaged_or_empty(directory, newest, fast_path):
    fast_path.chmod(0o755)
    for name in ("model.pt", "rank_0.pt"):
        newest.path_of(name).chmod(0)
        with as_nobody(), pytest.raises(PersistError, match=r"Permission denied.*Give this user the right"):
            directory.verify(newest, [name])
    for part in (".", ".fastckpt"):
        (directory.path / part).chmod(0)
        with as_nobody(), pytest.raises(PersistError, match="Permission denied"):
            directory.checkpoints()
        (directory.path / part).chmod(0o755)


def test_a_checkpoint_without_its_manifest_does_not_count(directory, newest):
    """It is reported where it looks like one of ours, but it is not moved: it may be another tool's."""
    (newest.place / "manifest.json").unlink()
    assert ids(directory) == [OLD]
    [(place, why)] = directory.scan().damaged
    assert place == newest.place and "has no manifest" in why
    with pytest.raises(PersistError, match="may be another tool's, and is not moved"):
        directory.quarantine(place, why)
    assert place.is_dir()


def test_a_manifest_in_another_steps_directory_is_reported(directory):
    publish(directory, OLD)
    shutil.copytree(directory.path / "checkpoint-5", directory.path / "checkpoint-9")
    assert ids(directory) == [OLD]
    [(path, why)] = directory.scan().damaged
    assert path == directory.path / "checkpoint-9" and "belongs in" in why


# --- quarantine


@pytest.fixture
def place(directory):
    """The place of the newer of two checkpoints."""
    publish(directory, OLD)
    publish(directory, BAD)
    return directory.path / "checkpoint-6"


def content(place):
    return {path.name: path.read_bytes() for path in place.iterdir() if path.name != "why.txt"}


def test_a_quarantined_checkpoint_does_not_count_and_its_files_are_never_deleted(directory, place):
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
    directory.sweep()
    directory.delete(BAD)
    for id in (BAD, NEWER, SaveId(3, 7)):
        publish(directory, id)
    directory.delete(NEWER)
    directory.sweep()
    assert content(aside) == before and [path for path, _ in directory.scan().quarantined] == [aside]
    with pytest.raises(ConfigError, match="part of a checkpoint"):
        publish(directory, SaveId(4, 8), str(aside / "model.pt"))


@pytest.mark.parametrize("harm", ["manifest.json", "model.pt"])
def test_a_checkpoint_that_a_scan_finds_damaged_is_quarantined_also_when_its_step_is_saved_again(
    directory, place, harm
):
    os.truncate(place / harm, 10)
    before = content(place)
    [(path, why)] = directory.scan().damaged
    aside = directory.quarantine(path, why)
    assert aside.name.startswith("quarantine-1-6-" if harm == "model.pt" else "quarantine-checkpoint-6-")
    scan = directory.scan()
    assert (scan.damaged, scan.quarantined) == ([], [(aside, why)])
    assert ids(directory) == [OLD]
    aside.rename(place)
    publish(directory, NEWER)
    assert assert_sound(directory) == [NEWER, OLD]
    [(aside, why)] = directory.scan().quarantined
    assert content(aside) == before and harm in why
    assert_clean(directory)


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


def test_a_checkpoint_moved_back_counts_and_can_be_quarantined_again(directory, place):
    directory.quarantine(directory.checkpoints()[0], "first").rename(place)
    assert assert_sound(directory) == [BAD, OLD]
    aside = directory.quarantine(directory.checkpoints()[0], "second")
    assert directory.scan().quarantined == [(aside, "second")]


def test_quarantine_spares_a_checkpoint_published_in_the_same_place(directory, place):
    bad = directory.checkpoints()[0]
    os.truncate(place / "model.pt", 1)
    [(damaged, _)] = directory.scan().damaged
    publish(directory, NEWER)
    for gone in (bad, damaged, directory.path / "checkpoint-77"):
        with pytest.raises(PersistError, match="another checkpoint took its place"):
            directory.quarantine(gone, "it was bad")
    assert assert_sound(directory) == [NEWER, OLD]


def test_a_damaged_checkpoint_whose_path_is_reused_is_not_deleted(directory, place, fast_path):
    target = str(fast_path / "mine.pt")
    publish(directory, NEWER, target)
    os.truncate(place / "rank_0.pt", 0)
    publish(directory, SaveId(2, 7), target)
    [(aside, why)] = directory.scan().quarantined
    assert aside.name.startswith("quarantine-2-6-") and "rank_0.pt has 0 bytes" in why
    assert assert_sound(directory) == [(2, 7), OLD]


def test_a_quarantine_killed_at_any_file_operation_loses_nothing(kills):
    def prepare(directory):
        publish(directory, OLD)
        publish(directory, BAD)
        prepare.before = content(directory.path / "checkpoint-6")
        return {"deed": "quarantine", "id": BAD}

    for directory, _, _ in kills(prepare, 5):
        directory.sweep()
        asides = directory.scan().quarantined
        if ids(directory) == [BAD, OLD]:
            assert asides == []
            asides = [(directory.quarantine(directory.checkpoints()[0], "it is bad"), "it is bad")]
        [(aside, why)] = asides
        assert (content(aside), why) == (prepare.before, "it is bad") and assert_sound(directory) == [OLD]


def test_a_quarantine_that_storage_refuses_changes_nothing(directory, place, fast_path):
    fast_path.chmod(0o755)
    bad = directory.checkpoints()[0]
    (directory.path / ".fastckpt/writers").touch(0o666)
    directory.path.chmod(0o555)
    refused = r"cannot quarantine step 6 of history 1 .*(Permission denied|not permit)"
    with as_nobody(), pytest.raises(PersistError, match=refused):
        CheckpointDirectory(directory.path).quarantine(bad, "it is bad")
    directory.path.chmod(0o700)
    assert assert_sound(directory) == [BAD, OLD]
