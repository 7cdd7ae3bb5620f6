"""A process that is killed while it writes leaves the old or the new checkpoint whole, never a mixture.

Kills are among what `test_replay` makes of each deed; here processes die, locks and all.
"""

from functools import partial
from multiprocessing import get_context

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.local import layout
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt.errors import PersistError
from tests.unit._core.storage.checkpoints import assert_clean, assert_named, assert_sound, ids, publish
from tests.unit._core.storage.conftest import killed, killed_at_each
from tests.unit._core.storage.scenes import NEW, OLD, OLDEST, SCENES, prepare


@pytest.mark.parametrize("scene", ["target_overwritten", "strangers_directory"])
def test_a_publication_killed_at_every_file_operation_leaves_old_or_new(fast_path, scene):
    seen, (_, id, named) = [], SCENES[scene]

    def target(directory):
        return named and f"{directory.path.parent}/{named}"

    def act(directory):
        publish(directory, id, target(directory))

    for directory, _ in killed_at_each(fast_path, lambda directory: prepare(scene, directory), act, 20):
        found = assert_sound(CheckpointDirectory(directory.path))
        assert found[0] in (OLD, id) and OLDEST in found
        seen.append(found[0])
        directory.sweep()
        # What was replaced, by a whole newer one, need not remain.
        assert assert_sound(directory) in (found, [found[0], OLDEST])
        assert_named(directory, is_over=False)
        assert_clean(directory)
        assert directory.sweep() == []
        theirs = [path.read_text() for path in directory.path.rglob("theirs")]
        assert theirs == ["theirs"] * (id.step == 9)
        publish(directory, id, target(directory))
        assert assert_sound(directory)[0] == id
        assert_named(directory)
        assert_clean(directory)
    assert seen == sorted(seen)  # before the commit the old one, after it the new one


def test_a_deletion_killed_at_any_operation_leaves_a_complete_checkpoint_or_none(fast_path):
    newer = SaveId(1, 8)

    def prepared(directory):
        publish(directory, OLDEST)
        publish(directory, OLD, str(directory.path / "ckpt-7.pt"))
        publish(directory, newer, str(directory.path / "new.pt"))

    kills = killed_at_each(fast_path, prepared, lambda directory: directory.delete(OLD), 10)
    for number, (directory, was_killed) in enumerate(kills):
        found = assert_sound(directory)
        assert found in ([newer, OLD, OLDEST], [newer, OLDEST]) and (was_killed or OLD not in found)
        if number % 2:
            directory.sweep()
            assert assert_sound(directory) == found
        directory.delete(OLD)
        assert ids(directory) == [newer, OLDEST]
        directory.sweep()
        assert_clean(directory)
        assert not (directory.path / "ckpt-7.pt").exists()


def test_a_sweep_keeps_files_of_a_live_writer_and_a_writer_waits_for_a_sweep_with_a_limit(directory, monkeypatch):
    """What a writer that is stopped has written so far is not garbage."""
    publish(directory, OLD)
    with directory._layout.writing():
        (directory.path / ".fastckpt/tmp-1234").mkdir()
        assert CheckpointDirectory(directory.path).sweep() == []
    assert CheckpointDirectory(directory.path).sweep() == [directory.path / ".fastckpt/tmp-1234"]
    monkeypatch.setattr(layout, "SWEEP_DEADLINE", 0.05)
    with directory._layout.alone() as alone:
        assert alone
        with pytest.raises(PersistError, match="being swept"):
            publish(directory, NEW)
    publish(directory, NEW)


def test_of_several_retired_checkpoints_the_newest_is_restored(directory):
    publish(directory, OLDEST)
    publish(directory, SaveId(0, 7))
    for id, phase in [(SaveId(1, 7), "drop"), (SaveId(2, 7), "drop"), (SaveId(3, 7), "rename")]:
        assert killed(directory, partial(publish, id=id), phase=f"persist.{phase}")
    assert assert_sound(directory) == [(2, 7), (1, 7), (0, 7), OLDEST]
    directory.sweep()
    assert assert_sound(directory) == [(2, 7), OLDEST]
    assert_clean(directory)


def test_readers_always_find_a_complete_checkpoint_during_publications(directory):
    """The same step and path, again and again: nothing else that a reader could fall back to."""
    named = str(directory.path / "ckpt.pt")
    publish(directory, SaveId(0, 7), named)

    def write():
        for history in range(1, 60):
            publish(CheckpointDirectory(directory.path), SaveId(history, 7), named)

    writer = get_context("fork").Process(target=write)
    writer.start()
    newest, reads = SaveId(0, 7), 0
    while writer.is_alive():
        scan = CheckpointDirectory(directory.path).scan()
        assert scan.damaged == []
        assert scan.whole[0].id >= newest
        newest, reads = scan.whole[0].id, reads + 1
    writer.join()
    assert reads > 5 and ids(directory) == [(59, 7)]
