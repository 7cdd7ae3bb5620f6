"""A process that is killed while it writes, or refused to, leaves the old or the new checkpoint whole, no mixture.

Kills before any operation are among what `test_replay` makes of each deed; here processes die, locks and all.
"""

import contextlib
import os
import re
import subprocess
from functools import partial
from multiprocessing import get_context

import pytest

from fastckpt._core import metrics
from fastckpt._core.byte_sizes import binary
from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.local import layout, part_files
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt.errors import PersistError
from tests.support.largest_file import largest_file
from tests.support.small_disks import leave
from tests.unit._core.storage.checkpoints import assert_clean, assert_sound, ids, images, publish
from tests.unit._core.storage.deeds import NEW, OLD, OLDEST, SCENES, Deed
from tests.unit._core.storage.disk import Disk
from tests.unit._core.storage.killed import killed, killed_at_each


@pytest.mark.parametrize("stride", [16, pytest.param(1, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("name", ["target_overwritten", "strangers_directory", "nodes_with_target", "delete"])
def test_what_is_killed_at_any_file_operation_is_done_or_not_and_is_done_again(fast_path, name, stride, monkeypatch):
    monkeypatch.setattr(part_files, "ABANDONED", -1.0)
    scene, seen = SCENES[name], []
    whole = scene.record(fast_path / "whole")
    for directory, was_killed in killed_at_each(fast_path, scene.prepare, scene.act, stride):
        root = directory.path.parent
        deed = Deed(root, Disk(root), [], whole.before, whole.after, begun=1, puts=False)
        seen.append(ids(directory)[0])
        deed.check(over=not was_killed)
        scene.act(directory)
        deed.check(over=True)
    # Before the commit the old one, after it the new one.
    assert seen == sorted(seen) and {*seen} == {whole.before[0], whole.after[0]}


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
        for history in range(1, 25):
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
    assert reads > 5 and ids(directory) == [(24, 7)]


# --- storage that refuses writes: full, a file size limit, forbidden

MiB = 2**20


@pytest.fixture
def save(tmp_path):
    """Publishes a step to a path of the user."""

    def do(directory, step, size=0, largest=0):
        source = images(tmp_path / "source", SaveId(0, step))
        if size:
            source["model.pt"].write_bytes(os.urandom(size))
        with largest_file(largest) if largest else contextlib.nullcontext():
            directory.publish(PublishRequest(SaveId(0, step), source, target=str(directory.path / "ckpt.pt")))

    return do


def test_a_disk_full_at_any_byte_keeps_the_checkpoint_before(disk, save):
    """The end of the space falls into every file in turn: images, draft, manifest, directories."""
    small = CheckpointDirectory(disk / "dir")
    save(small, 1)
    for size in (2 * MiB - 9000, 3 * MiB):
        no_space = rf"No space left.*needs {re.escape(binary(size + 8))}.*MiB is free\. Free space"
        with pytest.raises(PersistError, match=no_space):
            save(small, 9, size)
        assert assert_sound(small) == [(0, 1)]
        assert_clean(small)
    outcomes = []
    for pages in range(0, 30):
        filler = leave(disk, 4096 * pages)
        try:
            save(small, 2)
            break
        except PersistError as error:
            outcomes.append(str(error))
            assert assert_sound(small) == [(0, 1)]
            assert_clean(small)
        filler.unlink()
    assert outcomes and all("No space left" in error for error in outcomes)
    assert assert_sound(small)[0] == (0, 2)


def test_a_file_size_limit_fails_a_publication_and_a_file_has_no_checkpoints(tmp_path, save):
    directory = CheckpointDirectory(tmp_path / "dir")
    publish(directory, SaveId(0, 1))
    too_large = r"File too large\. It needs 3\.0 MiB; .* Raise the limit"
    with pytest.raises(PersistError, match=too_large):
        save(directory, 9, 3 * MiB, largest=MiB)
    assert assert_sound(directory) == [(0, 1)]
    assert_clean(directory)
    (tmp_path / "file").write_text("a file")
    directory = CheckpointDirectory(tmp_path / "file")
    for deed in (directory.checkpoints, directory.scan, lambda: publish(directory, SaveId(0, 1))):
        with pytest.raises(PersistError, match=r"Not a directory\. Choose another path"):
            deed()


def test_a_retired_checkpoint_is_restored_when_the_new_one_is_refused(tmp_path, monkeypatch):
    """The rename is forbidden, to root as well, after everything was written."""
    directory = CheckpointDirectory(tmp_path / "dir")
    publish(directory, SaveId(0, 5))

    def freeze(phase, fields):
        if phase != "persist.rename":
            return
        if subprocess.run(["chattr", "+i", directory.path], check=False, capture_output=True).returncode:
            pytest.skip("chattr +i is not permitted")

    monkeypatch.setattr(metrics, "_observers", [freeze])
    try:
        with pytest.raises(PersistError, match=r"Operation not permitted\. Give this user"):
            publish(directory, SaveId(1, 5))
        monkeypatch.undo()
        assert assert_sound(directory) == [(0, 5)]  # where it was retired to: it cannot be put back for now
    finally:
        subprocess.run(["chattr", "-i", directory.path], check=False)
    assert directory.sweep() == [directory.path / "checkpoint-5"]
    assert assert_sound(directory) == [(0, 5)]
    publish(directory, SaveId(1, 5))
    assert assert_sound(directory) == [(1, 5)]
    assert_clean(directory)
