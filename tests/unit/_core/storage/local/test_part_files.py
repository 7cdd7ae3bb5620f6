"""Several nodes write one checkpoint: it counts once all parts are present, and then at once and complete."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.local import layout, part_files
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt._core.storage.share import Share
from fastckpt.errors import BadCheckpoint, PersistError
from tests.unit._core.storage.checkpoints import assert_clean, assert_sound, contribute, ids, publish
from tests.unit._core.storage.conftest import Crasher

OLD, NEW = SaveId(0, 7), SaveId(1, 7)
TARGETS = ["", "user/ckpt.pt"]


@pytest.fixture(params=TARGETS)
def target(request, fast_path):
    return request.param and str(fast_path / request.param)


def places(directory: CheckpointDirectory) -> list[Path]:
    return sorted((directory.path / ".fastckpt").glob("parts-*"))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_the_last_part_completes_a_checkpoint(directory, target, order):
    publish(directory, OLD, target)
    contributions = []
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


@pytest.mark.parametrize("name", ["rank_1.pt", "part-1.json"])
@pytest.mark.parametrize("content", [b"short", None])
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
    kept = [shutil.copytree(path, directory.path.parent / path.name) for path in left]
    for node in (0, 1):
        last = contribute(directory, NEW, Share(node, 2, target=target))
    assert last.complete() and assert_sound(directory) == [NEW] and places(directory) == []
    for path in kept:
        path.rename(directory.path / ".fastckpt" / path.name)
    assert len(left) == 2 and directory.sweep() == left
    assert_clean(directory)


def test_a_sweep_keeps_parts_that_may_still_be_completed(directory, target, monkeypatch):
    publish(directory, OLD)
    first = contribute(directory, NEW, Share(0, 2, target=target))
    assert directory.sweep() == [] and len(places(directory)) == 1
    monkeypatch.setattr(part_files, "ABANDONED", -1)
    assert directory.sweep() == places(directory) or not places(directory)
    assert first.missing() == [0, 1] and first.complete() is None
    assert assert_sound(directory) == [OLD]
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


def test_a_node_whose_storage_refuses_leaves_the_parts_of_the_others(directory, target, monkeypatch):
    contribute(directory, NEW, Share(1, 2, target=target))
    real = os.pwrite

    def refuse(fd, data, offset):
        if b"model" in bytes(data[:100]):
            raise OSError(errno.EIO, "broken")
        return real(fd, data, offset)

    with monkeypatch.context() as broken, pytest.raises(PersistError, match="broken"):
        broken.setattr(os, "pwrite", refuse)
        contribute(directory, NEW, Share(0, 2, target=target))
    files = [path.name for path in directory.path.parent.rglob("*.pt") if "image" not in str(path)]
    assert files == ["rank_1.pt"] and not list(directory.path.parent.rglob(".fastckpt-*"))
    assert contribute(directory, NEW, Share(0, 2, target=target)).complete()
    assert assert_sound(directory) == [NEW]


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


@pytest.mark.parametrize(
    ("node", "target"),
    [
        (0, "user/ckpt.pt"),
        *(pytest.param(*row, marks=pytest.mark.campaign) for row in ((0, ""), (1, ""), (1, "user/ckpt.pt"))),
    ],
)
def test_a_node_killed_at_any_file_operation_leaves_old_or_new_checkpoint(kills, node, target):
    """Whatever it left, the others publish if its part was there; else its retry does, or a sweep takes it away."""
    outcomes = set()

    def prepare(directory):
        named = target and str(directory.path.parent / target)
        publish(directory, OLD, named)
        prepare.other = contribute(directory, NEW, Share(1 - node, 2, target=named))
        return {"deed": "node", "id": NEW, "node": node, "nodes": 2, "target": named}

    for number, (directory, deed, _) in enumerate(kills(prepare, 20)):
        named, other = deed["target"], prepare.other
        assert assert_sound(CheckpointDirectory(directory.path)) in ([OLD], [NEW], [NEW, OLD])
        if number % 2:
            directory.sweep()
        published = other.complete()
        outcomes.add(published is not None)
        assert assert_sound(directory)[0] == (NEW if published else OLD)
        retry = contribute(directory, NEW, Share(node, 2, target=named))
        if not published and other.missing():
            other = contribute(directory, NEW, Share(1 - node, 2, target=named))
        assert retry.complete() and other.complete()
        directory.sweep()
        assert assert_sound(directory) == [NEW]
        assert_clean(directory)
    assert outcomes == {True, False}


def test_concurrent_publishers_publish_once(directory, target):
    """Nodes in processes of their own, all at once: one publishes, the others find it published."""
    nodes = [Crasher() for _ in range(3)]
    try:
        for history in range(1, 16):
            for number, node in enumerate(nodes):
                node.begin(directory, "node", SaveId(history, 7), nodes=3, node=number, target=target, waits=True)
            assert not any([node.was_killed() for node in nodes])
            assert assert_sound(directory) == [(history, 7)]
            assert_clean(directory)
    finally:
        for node in nodes:
            node.close()
