"""A process that is killed while it writes leaves the old or the new checkpoint whole, never a mixture."""

import threading

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.local import layout
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt.errors import PersistError
from tests.unit._core.storage.checkpoints import assert_clean, assert_named, assert_sound, ids, publish
from tests.unit._core.storage.scenes import NEW, OLD, OLDEST, SCENES, prepare

PHASES = ["write", "manifest", "retire", "rename", "link", "tracker", "drop"]


def rows(default: list, others: list) -> list:
    """Some in each run, the others in the campaign."""
    return [*default, *(pytest.param(*row, marks=pytest.mark.campaign) for row in others if row not in default)]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("scene",), rows([("again",), ("target_overwritten",)], [(scene,) for scene in SCENES]))
def test_a_publication_killed_at_any_phase_leaves_old_or_new(directory, crash, scene, phase):
    id, target = prepare(scene, directory)
    killed = crash(directory, "publish", id, target=target, phase=f"persist.{phase}")
    assert killed or (phase == "link" and not target.endswith("ckpt.pt"))
    found = assert_sound(CheckpointDirectory(directory.path))
    assert found[0] == (id if phase in ("link", "tracker", "drop") or not killed else OLD)
    assert OLDEST in found
    check_after_sweep(directory, found, id, target)


@pytest.mark.parametrize(
    ("scene",), rows([("target_overwritten",), ("strangers_directory",)], [(scene,) for scene in SCENES])
)
def test_a_publication_killed_at_every_file_operation_leaves_old_or_new(kills, scene):
    seen = []

    def publication(directory):
        id, target = prepare(scene, directory)
        return {"deed": "publish", "id": id, "target": target}

    for directory, deed, _ in kills(publication, 20):
        found = assert_sound(CheckpointDirectory(directory.path))
        assert found[0] in (OLD, deed["id"]) and OLDEST in found
        seen.append(found[0])
        check_after_sweep(directory, found, deed["id"], deed["target"])
    assert seen == sorted(seen)  # before the commit the old one, after it the new one


def check_after_sweep(directory, found, id, target, copies=1):
    directory.sweep()
    # What was replaced, by a whole newer one, need not remain.
    assert assert_sound(directory) in (found, [found[0], OLDEST])
    assert_named(directory, is_over=False)
    assert_clean(directory)
    assert directory.sweep() == []
    theirs = [path.read_text() for path in directory.path.rglob("theirs")]
    assert theirs == ["theirs"] * len(theirs) and (id.step == 9) <= len(theirs) <= copies
    publish(directory, id, target)
    assert assert_sound(directory)[0] == id
    assert_named(directory)
    assert_clean(directory)


@pytest.mark.parametrize(("target", "retry"), [("", "delete"), ("ckpt-7.pt", "sweep")])
def test_a_deletion_killed_at_any_operation_leaves_a_complete_checkpoint_or_none(kills, target, retry):
    newer = SaveId(1, 8)

    def deletion(directory):
        publish(directory, OLDEST)
        publish(directory, OLD, target and str(directory.path / target))
        publish(directory, newer, str(directory.path / "new.pt"))
        return {"deed": "delete", "id": OLD}

    for directory, _, killed in kills(deletion, 10):
        found = assert_sound(directory)
        assert found in ([newer, OLD, OLDEST], [newer, OLDEST]) and (killed or OLD not in found)
        if retry == "sweep":
            directory.sweep()
            assert assert_sound(directory) == found
        directory.delete(OLD)
        assert ids(directory) == [newer, OLDEST]
        directory.sweep()
        assert_clean(directory)
        assert not (directory.path / "ckpt-7.pt").exists()


@pytest.mark.parametrize(
    ("scene", "phase"),
    rows(
        [("target_overwritten", "rename")],
        [(s, p) for s in ("another_history", "target_overwritten", "target_again") for p in ("rename", "drop")],
    ),
)
def test_a_sweep_killed_at_any_operation_loses_no_checkpoint(kills, crash, scene, phase):
    def remains(directory):
        id, target = remains.published = prepare(scene, directory)
        assert crash(directory, "publish", id, target=target, phase=f"persist.{phase}")
        remains.before = assert_sound(directory)
        return {"deed": "sweep", "id": id}

    for directory, _, _ in kills(remains, 10):
        assert assert_sound(directory) in (remains.before, [remains.before[0], OLDEST])
        check_after_sweep(directory, remains.before, *remains.published)


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
def test_readers_always_find_a_complete_checkpoint_during_publications(directory, crash, target):
    """The same step, or the same path, again and again: nothing else that a reader could fall back to."""
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
