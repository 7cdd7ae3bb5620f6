"""A process that is killed while it writes leaves the old or the new checkpoint whole, never a mixture."""

import shutil
import threading

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.local.directory import CheckpointDirectory
from tests.unit._core.storage.checkpoints import assert_clean, assert_named, assert_sound, ids, publish
from tests.unit._core.storage.scenes import (
    NEW,
    OLD,
    OLDEST,
    SCENES,
    another_history,
    target_again,
    target_overwritten,
)

PHASES = ["write", "manifest", "retire", "rename", "link", "tracker", "drop"]


@pytest.fixture
def directory(tmp_path):
    return CheckpointDirectory(tmp_path / "dir")


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("phase", PHASES)
def test_a_publication_killed_at_any_phase_leaves_old_or_new(directory, crash, scene, phase):
    publish(directory, OLDEST)
    id, target = scene(directory)
    killed = crash(directory, "publish", id, target=target, phase=f"persist.{phase}")
    assert killed or (phase == "link" and not target.endswith("ckpt.pt"))
    found = assert_sound(CheckpointDirectory(directory.path))
    assert found[0] == (id if phase in ("link", "tracker", "drop") or not killed else OLD)
    assert OLDEST in found
    check_after_sweep(directory, found, id, target)


@pytest.mark.parametrize("scene", SCENES)
def test_a_publication_killed_at_every_file_operation_leaves_old_or_new(fast_path, crash, scene):
    operation, seen = 0, []
    while True:
        operation += 1
        directory = CheckpointDirectory(fast_path / str(operation) / "dir")
        publish(directory, OLDEST)
        id, target = scene(directory)
        if not crash(directory, "publish", id, target=target, operation=operation):
            break
        found = assert_sound(CheckpointDirectory(directory.path))
        assert found[0] in (OLD, id) and OLDEST in found
        seen.append(found[0])
        check_after_sweep(directory, found, id, target)
        shutil.rmtree(directory.path.parent)
    assert operation > 20
    assert seen == sorted(seen)  # before the commit the old one, after it the new one


def check_after_sweep(directory, found, id, target):
    directory.sweep()
    # What was replaced, by a whole newer one, need not remain.
    assert assert_sound(directory) in (found, [found[0], OLDEST])
    assert_named(directory, is_over=False)
    assert_clean(directory)
    assert directory.sweep() == []
    theirs = [path.read_text() for path in directory.path.rglob("theirs")]
    assert theirs in ([], ["theirs"])
    publish(directory, id, target)
    assert assert_sound(directory)[0] == id
    assert_named(directory)
    assert_clean(directory)


@pytest.mark.parametrize("target", ["", "ckpt-7.pt"])
@pytest.mark.parametrize("retry", ["sweep", "delete"])
def test_a_deletion_killed_at_any_operation_leaves_a_complete_checkpoint_or_none(fast_path, crash, target, retry):
    operation, newer = 0, SaveId(1, 8)
    while True:
        operation += 1
        directory = CheckpointDirectory(fast_path / str(operation) / "dir")
        publish(directory, OLDEST)
        publish(directory, OLD, target and str(directory.path / target))
        publish(directory, newer, str(directory.path / "new.pt"))
        if not crash(directory, "delete", OLD, operation=operation):
            break
        found = assert_sound(directory)
        assert found in ([newer, OLD, OLDEST], [newer, OLDEST])
        directory.sweep()
        assert assert_sound(directory) == found
        directory.delete(OLD)
        assert ids(directory) == [newer, OLDEST]
        assert_clean(directory)
        assert not (directory.path / "ckpt-7.pt").exists()
        shutil.rmtree(directory.path.parent)
    assert operation > 10


@pytest.mark.parametrize(
    ("scene", "phase"),
    [
        (another_history, "drop"),
        (target_overwritten, "rename"),
        pytest.param(another_history, "rename", marks=pytest.mark.campaign),
        pytest.param(target_overwritten, "drop", marks=pytest.mark.campaign),
        pytest.param(target_again, "rename", marks=pytest.mark.campaign),
        pytest.param(target_again, "drop", marks=pytest.mark.campaign),
    ],
)
def test_a_sweep_killed_at_any_operation_loses_no_checkpoint(fast_path, crash, scene, phase):
    operation = 0
    while True:
        operation += 1
        directory = CheckpointDirectory(fast_path / str(operation) / "dir")
        publish(directory, OLDEST)
        id, target = scene(directory)
        assert crash(directory, "publish", id, target=target, phase=f"persist.{phase}")
        before = assert_sound(directory)
        if not crash(directory, "sweep", id, operation=operation):
            break
        assert assert_sound(directory) in (before, [before[0], OLDEST])
        check_after_sweep(directory, before, id, target)
        shutil.rmtree(directory.path.parent)
    assert operation > 10


def test_a_sweep_keeps_files_of_a_live_writer(directory, tmp_path):
    """What a writer that is stopped has written so far is not garbage."""
    publish(directory, OLD)
    with directory._layout.writing():
        (directory.path / ".fastckpt/tmp-1234").mkdir()
        assert CheckpointDirectory(directory.path).sweep() == []
    assert CheckpointDirectory(directory.path).sweep() == [directory.path / ".fastckpt/tmp-1234"]


def test_a_writer_waits_for_a_sweep_with_a_limit(directory, monkeypatch):
    from fastckpt._core.storage.local import layout
    from fastckpt.errors import PersistError

    monkeypatch.setattr(layout, "SWEEP_DEADLINE", 0.05)
    publish(directory, OLD)
    with directory._layout.alone() as alone:
        assert alone
        with pytest.raises(PersistError, match="being swept"):
            publish(directory, NEW)
    publish(directory, NEW)


def test_of_several_retired_checkpoints_the_newest_is_restored(directory, crash):
    publish(directory, OLDEST)
    publish(directory, SaveId(0, 7))
    for id, phase in [(SaveId(1, 7), "drop"), (SaveId(2, 7), "drop"), (SaveId(3, 7), "rename")]:
        assert crash(directory, "publish", id, phase=f"persist.{phase}")
    assert assert_sound(directory) == [(2, 7), (1, 7), (0, 7), OLDEST]
    directory.sweep()
    assert assert_sound(directory) == [(2, 7), OLDEST]
    assert_clean(directory)


@pytest.mark.parametrize("target", ["", "ckpt.pt"])
def test_readers_always_find_a_complete_checkpoint_during_publications(fast_path, crash, target):
    """The same step, or the same path, again and again: nothing else that a reader could fall back to."""
    directory = CheckpointDirectory(fast_path / "dir")
    named = target and str(directory.path / target)
    publish(directory, SaveId(0, 7), named)
    done = threading.Event()

    def write():
        for history in range(1, 60):
            if not done.is_set():
                crash(directory, "publish", SaveId(history, 7), target=named)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    newest, reads = SaveId(0, 7), 0
    try:
        while not done.is_set():
            scan = CheckpointDirectory(directory.path).scan()
            assert scan.damaged == []
            assert scan.whole[0].id >= newest
            newest, reads = scan.whole[0].id, reads + 1
    finally:
        done.set()
        writer.join()
    assert reads > 5 and ids(directory) == [(59, 7)]
