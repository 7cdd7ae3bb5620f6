"""Several nodes write one checkpoint: it counts once all parts are present, and then at once and complete."""

import errno
import shutil
import time
from pathlib import Path

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.local import layout
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt._core.storage.share import Share
from fastckpt.errors import BadCheckpoint, PersistError
from tests.unit._core.storage.checkpoints import assert_clean, assert_sound, contribute, ids, publish
from tests.unit._core.storage.conftest import at_once, killed_at_each

OLD, NEW = SaveId(0, 7), SaveId(1, 7)


@pytest.fixture(params=["", "user/ckpt.pt"])
def target(request, fast_path):
    return request.param and str(fast_path / request.param)


def places(directory: CheckpointDirectory) -> list[Path]:
    return sorted((directory.path / ".fastckpt").glob("parts-*"))


def test_the_last_part_completes_a_checkpoint(directory, target):
    publish(directory, OLD, target)
    contributions, order = [], (2, 0, 1)
    for count, node in enumerate(order):
        assert ids(directory) == [OLD]
        contributions.append(contribute(directory, NEW, Share(node, 3, target=target)))
        assert contributions[-1].missing() == sorted(order[count + 1 :])
        manifest = contributions[-1].complete()
        assert (manifest is None) == (count < 2)
    assert assert_sound(directory) == [NEW]
    assert [contribution.complete() for contribution in contributions] == [manifest] * 3
    [stored] = directory.checkpoints()
    names = {"model.pt", "rank_0.pt", "rank_1.pt", "rank_2.pt", "empty-1", "empty-2"}
    assert {entry.name for entry in manifest.files} == names
    assert {path.name for path in stored.place.iterdir()} == names | {"manifest.json"}
    assert stored.owns_target() == bool(target)
    assert manifest.details == {"attempt": "", "omp_num_threads": 1} and manifest.world_size == 3
    assert (directory.path / "latest_checkpointed_iteration.txt").read_text() == "7"
    assert_clean(directory)


def written(directory) -> dict:
    """Each file of a directory, and when it was written; a look at it changes neither."""
    found = ((path, path.stat()) for path in directory.path.rglob("*") if path.is_file())
    return {path: (stat.st_ino, stat.st_mtime_ns) for path, stat in found}


def test_a_part_is_written_once_and_another_attempt_replaces_what_the_first_published(directory, target):
    first = contribute(directory, NEW, Share(0, 2, target=target))
    before = written(directory)
    assert contribute(directory, NEW, Share(0, 2, target=target)).missing() == first.missing() == [1]
    assert before == written(directory)
    contribute(directory, NEW, Share(1, 2, target=target)).complete()
    assert contribute(directory, NEW, Share(0, 2, target=target)).complete()
    assert assert_sound(directory) == [NEW]
    for node in (0, 1):
        last = contribute(directory, NEW, Share(node, 2, "b", target))
    assert last.complete() and [each.manifest.details["attempt"] for each in directory.checkpoints()] == ["b"]
    assert_clean(directory)


@pytest.mark.parametrize(("name", "content"), [("rank_1.pt", b"short"), ("rank_1.pt", None), ("part-1.json", b"short")])
def test_a_damaged_part_is_missing_until_it_is_written_again(directory, name, content):
    contribute(directory, NEW, Share(1, 2))
    [path] = directory.path.rglob(name)
    path.write_bytes(content) if content else path.unlink()
    first = contribute(directory, NEW, Share(0, 2))
    assert first.missing() == [1] and first.complete() is None
    contribute(directory, NEW, Share(1, 2))
    assert first.complete() and assert_sound(directory) == [NEW]
    assert_clean(directory)


def test_parts_of_unlike_attempts_paths_or_node_counts_are_not_joined(directory, fast_path):
    """Another attempt with a history of the same number, another path, another number of nodes."""
    contribute(directory, NEW, Share(0, 2, attempt="a"))
    others = [Share(1, 2, attempt="b"), Share(1, 2), Share(1, 3, attempt="a"), Share(1, 2, "a", str(fast_path / "x"))]
    for share in others:
        assert contribute(directory, NEW, share).complete() is None
    assert ids(directory) == [] and len(places(directory)) == 5
    assert contribute(directory, NEW, Share(1, 2, attempt="a")).complete()
    assert assert_sound(directory) == [NEW]
    publish(directory, SaveId(1, 8))
    assert_clean(directory)


def test_parts_of_unlike_jobs_or_that_another_node_has_written_over_are_refused_and_reported(directory):
    (directory.path / ".fastckpt/parts-1-6-0123456789ab/files").mkdir(parents=True)  # of no node: not reported
    contribute(directory, NEW, Share(0, 2))
    odd = directory.contribute(PublishRequest(NEW, {"rank_1.pt": Path(__file__)}, world_size=5), Share(1, 2))
    with pytest.raises(BadCheckpoint, match="numbers of ranks"):
        odd.complete()
    [unfinished] = directory.settle()
    assert unfinished.id == NEW and "cannot be published: the parts of step 7" in unfinished.why
    contribute(directory, NEW, Share(0, 2, "b"))
    again = directory.contribute(
        PublishRequest(NEW, {"rank_0.pt": Path(__file__)}, world_size=2, details={"attempt": "b"}), Share(1, 2, "b")
    )
    assert again.complete() is None and again.missing() == [0] and ids(directory) == []


def test_leftover_parts_are_removed_by_the_next_publication_or_a_sweep_after_it(directory, target):
    contribute(directory, OLD, Share(0, 2, "dead", target))
    contribute(directory, OLD, Share(1, 3, "dead"))
    left = places(directory)
    assert directory.sweep() == [], "they may still be completed"
    kept = [shutil.copytree(path, directory.path.parent / path.name) for path in left]
    for node in (0, 1):
        last = contribute(directory, NEW, Share(node, 2, target=target))
    assert last.complete() and assert_sound(directory) == [NEW] and places(directory) == []
    for path in kept:
        path.rename(directory.path / ".fastckpt" / path.name)
    assert len(left) == 2 and directory.sweep() == left
    assert_clean(directory)


@pytest.mark.parametrize("is_swept", [False, True])
def test_complete_parts_are_published_by_a_reader_or_a_sweep_and_incomplete_ones_reported(directory, target, is_swept):
    publish(directory, OLD, target)
    assert directory.settle() == []
    contribute(directory, NEW, Share(0, 2, target=target))
    assert [(each.id, each.why) for each in directory.settle()] == [(NEW, "it lacks the parts of 1 of 2 nodes: 1")]
    contribute(directory, NEW, Share(1, 2, target=target))
    assert assert_sound(directory) == [OLD] and directory.scan().gathered == [NEW]
    if is_swept:
        assert places(directory) == directory.sweep() != []
    else:
        assert [manifest.id for manifest in directory.settle()] == [NEW]
    assert assert_sound(directory)[0] == NEW and directory.settle() == []
    assert_clean(directory)


def test_without_file_locks_the_first_node_publishes(directory, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(layout.fcntl, "flock", refuse)
    first, second = (contribute(directory, NEW, Share(node, 2)) for node in (0, 1))
    assert second.complete() is None and directory.sweep() == []
    assert first.complete() == second.complete() is not None
    assert_sound(directory)


def test_a_publication_whose_rename_is_refused_can_be_repeated(directory, fast_path):
    """What all have written is kept: the others' memory may hold something else by now."""
    publish(directory, OLD)
    target = fast_path / "user/ckpt.pt"
    for node in (0, 1):
        last = contribute(directory, NEW, Share(node, 2, target=str(target)))
    (target / "theirs").mkdir(parents=True)
    with pytest.raises(PersistError, match="Is a directory"):
        last.complete()
    assert assert_sound(directory) == [OLD]
    shutil.rmtree(target)
    assert last.complete() and assert_sound(directory) == [NEW]
    assert_clean(directory)


def test_a_node_killed_at_any_file_operation_leaves_old_or_new_checkpoint(fast_path):
    """Whatever it left, the others publish if its part was there; else its retry does, or a sweep takes it away."""
    outcomes, other = set(), []

    def named(directory):
        return str(directory.path.parent / "user/ckpt.pt")

    def prepared(directory):
        publish(directory, OLD, named(directory))
        other[:] = [contribute(directory, NEW, Share(1, 2, target=named(directory)))]

    def act(directory):
        contribute(directory, NEW, Share(0, 2, target=named(directory))).complete()

    for number, (directory, _) in enumerate(killed_at_each(fast_path, prepared, act, 20)):
        assert assert_sound(CheckpointDirectory(directory.path)) in ([OLD], [NEW], [NEW, OLD])
        if number % 2:
            directory.sweep()
        published = other[0].complete()
        outcomes.add(published is not None)
        assert assert_sound(directory)[0] == (NEW if published else OLD)
        retry = contribute(directory, NEW, Share(0, 2, target=named(directory)))
        if not published and other[0].missing():
            other = [contribute(directory, NEW, Share(1, 2, target=named(directory)))]
        assert retry.complete() and other[0].complete()
        directory.sweep()
        assert assert_sound(directory) == [NEW]
        assert_clean(directory)
    assert outcomes == {True, False}


def test_concurrent_publishers_publish_once(directory, fast_path):
    """Nodes in processes of their own, all at once: one publishes, the others find it published."""
    for history in range(1, 11):

        def publish_as(node, history=history):
            share = Share(node, 3, target=f"{fast_path}/ckpt.pt")
            part = contribute(CheckpointDirectory(directory.path), SaveId(history, 7), share)
            end = time.monotonic() + 60
            while part.complete() is None:
                assert time.monotonic() < end, part.missing()
            return "published"

        assert at_once(3, publish_as) == ["published"] * 3
        assert assert_sound(directory) == [(history, 7)]
        assert_clean(directory)
