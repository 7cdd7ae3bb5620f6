"""Several nodes write one checkpoint: it counts once all parts are present, and then at once and complete."""

import errno
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.local import layout
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt._core.storage.remote import upload
from fastckpt._core.storage.remote.remote_store import RemoteStore
from fastckpt._core.storage.share import Share
from fastckpt._core.storage.store import Store, open_store
from fastckpt.errors import BadCheckpoint, PersistError
from tests.unit._core.storage import checkpoints
from tests.unit._core.storage.checkpoints import assert_clean, assert_sound, publish
from tests.unit._core.storage.conftest import at_once

OLD, NEW = SaveId(0, 7), SaveId(1, 7)
COPY = "user/ckpt.pt"


@pytest.fixture(params=["directory", "url"])
def store(request: pytest.FixtureRequest, fast_path: Path) -> Iterator[Store]:
    made = open_store(f"memory:/{fast_path}/run" if request.param == "url" else fast_path / "dir")
    yield made
    made.close()


@pytest.fixture
def far(fast_path: Path) -> Iterator[RemoteStore]:
    made = RemoteStore(f"memory:/{fast_path}/run")
    yield made
    made.close()


@pytest.fixture
def contribute(fast_path: Path):
    return lambda store, share, id=NEW, **request: checkpoints.contribute(fast_path, store, share, id, **request)


def ids(store: Store) -> list[SaveId]:
    """What counts, each verified."""
    scan = store.scan()
    for stored in scan.whole:
        store.verify(stored)
    assert scan.damaged == []
    return [stored.id for stored in scan.whole]


def places(store: CheckpointDirectory) -> list[Path]:
    return sorted((store.path / ".fastckpt").glob("parts-*"))


def path_in(store: Store, target: str) -> str:
    return str(store.path.parent / target) if target and isinstance(store, CheckpointDirectory) else target


@pytest.mark.parametrize("target", ["", COPY])
def test_the_last_part_completes_a_checkpoint(store, contribute, target):
    named, contributions, order = path_in(store, target), [], (2, 0, 1)
    for count, node in enumerate(order):
        assert ids(store) == [] and store.scan().gathered == [NEW] * bool(count)
        contributions.append(contribute(store, Share(node, 3, target=named)))
        assert contributions[-1].missing() == sorted(order[count + 1 :])
        manifest = contributions[-1].complete()
        assert (manifest is None) == (count < 2)
    assert ids(store) == [NEW] and store.scan().gathered == []
    assert [each.complete() for each in contributions] == [manifest] * 3
    names = {"model.pt", "rank_0.pt", "rank_1.pt", "rank_2.pt", "empty-1", "empty-2"}
    assert {entry.name for entry in manifest.files} == names
    assert manifest.details == {"attempt": "", "omp_num_threads": 1} and manifest.world_size == 3
    assert manifest.target == named
    assert contribute(store, Share(1, 3, target=named)).complete() == manifest
    if isinstance(store, CheckpointDirectory):
        [stored] = store.checkpoints()
        assert {path.name for path in stored.place.iterdir()} == names | {"manifest.json"}
        assert stored.owns_target() == bool(target)
        assert (store.path / "latest_checkpointed_iteration.txt").read_text() == "7"
        assert_clean(store)


def test_parts_of_unlike_attempts_paths_node_counts_or_jobs_are_not_joined(store, contribute):
    """Another attempt with a history of the same number, another path, another number of nodes, or of ranks."""
    contribute(store, Share(0, 2, "a"))
    others = [Share(1, 2, "b"), Share(1, 2), Share(1, 3, "a"), Share(1, 2, "a", path_in(store, "copy.pt"))]
    for share in others:
        assert contribute(store, share).complete() is None
    odd = contribute(store, Share(1, 2, "a"), world_size=5)
    with pytest.raises(BadCheckpoint, match="numbers of ranks"):
        odd.complete()
    [unfinished] = [each for each in store.settle() if "cannot be published" in str(each)]
    assert unfinished.id == NEW and "cannot be published: the parts of step 7" in unfinished.why
    assert ids(store) == []


@pytest.mark.parametrize("is_swept", [False, True])
def test_complete_parts_are_published_by_a_reader_or_a_sweep_and_incomplete_ones_reported(store, contribute, is_swept):
    """All nodes were killed when they had written their parts."""
    target = path_in(store, COPY)
    for node in (0, 1):
        contribute(store, Share(node, 2), OLD).complete()
    assert store.settle() == []
    contribute(store, Share(0, 2, target=target))
    assert [(each.id, each.why) for each in store.settle()] == [(NEW, "it lacks the parts of 1 of 2 nodes: 1")]
    contribute(store, Share(1, 2, target=target))
    assert ids(store)[0] == OLD and store.scan().gathered == [NEW]
    if is_swept and isinstance(store, CheckpointDirectory):
        assert places(store) == store.sweep() != []
    else:
        [manifest] = store.settle()
        assert (manifest.id, manifest.target) == (NEW, target)
    assert ids(store)[0] == NEW and store.settle() == [] == store.scan().gathered
    if isinstance(store, RemoteStore):
        assert store._objects.sizes("user") == {}, "who only finds the parts was not asked for a copy"
    else:
        assert_clean(store)


def test_a_part_is_written_once_and_another_attempt_replaces_what_the_first_published(directory, contribute):
    def written():
        """Each file, and when it was written; a look at it changes neither."""
        found = ((path, path.stat()) for path in directory.path.rglob("*") if path.is_file())
        return {path: (stat.st_ino, stat.st_mtime_ns) for path, stat in found}

    first = contribute(directory, Share(0, 2))
    before = written()
    assert contribute(directory, Share(0, 2)).missing() == first.missing() == [1]
    assert before == written()
    contribute(directory, Share(1, 2)).complete()
    assert contribute(directory, Share(0, 2)).complete()
    assert assert_sound(directory) == [NEW]
    for node in (0, 1):
        last = contribute(directory, Share(node, 2, "b"))
    assert last.complete() and [each.manifest.details["attempt"] for each in directory.checkpoints()] == ["b"]
    assert_clean(directory)


def test_a_damaged_part_is_missing_until_it_is_written_again(directory, contribute):
    for history, (name, content) in enumerate(
        (("rank_1.pt", b"short"), ("rank_1.pt", None), ("part-1.json", b"short"))
    ):
        id = SaveId(history, 7)
        contribute(directory, Share(1, 2), id)
        [path] = (directory.path / ".fastckpt").rglob(name)
        path.write_bytes(content) if content else path.unlink()
        first = contribute(directory, Share(0, 2), id)
        assert first.missing() == [1] and first.complete() is None
        contribute(directory, Share(1, 2), id)
        assert first.complete() and assert_sound(directory) == [id]
        assert_clean(directory)


def test_a_part_that_another_node_has_written_over_is_missing_and_one_of_no_node_not_reported(directory, contribute):
    (directory.path / ".fastckpt/parts-1-6-0123456789ab/files").mkdir(parents=True)
    contribute(directory, Share(0, 2))
    again = contribute(directory, Share(1, 2), images={"rank_0.pt": Path(__file__)})
    assert again.complete() is None and again.missing() == [0] and ids(directory) == []
    assert [each.id for each in directory.settle()] == [NEW]


@pytest.mark.parametrize("target", ["", COPY])
def test_leftover_parts_are_removed_by_the_next_publication_or_a_sweep_after_it(directory, contribute, target):
    target = path_in(directory, target)
    contribute(directory, Share(0, 2, "dead", target), OLD)
    contribute(directory, Share(1, 3, "dead"), OLD)
    left = places(directory)
    assert directory.sweep() == [], "they may still be completed"
    kept = [shutil.copytree(path, directory.path.parent / path.name) for path in left]
    for node in (0, 1):
        last = contribute(directory, Share(node, 2, target=target))
    assert last.complete() and assert_sound(directory) == [NEW] and places(directory) == []
    for path in kept:
        path.rename(directory.path / ".fastckpt" / path.name)
    assert len(left) == 2 and directory.sweep() == left
    assert_clean(directory)


def test_leftover_uploaded_parts_are_removed_and_none_published_that_was_quarantined(far, contribute):
    contribute(far, Share(0, 2), OLD)
    assert far.sweep() == [] and far.scan().gathered == [OLD]
    for node in (0, 1):
        last = contribute(far, Share(node, 2))
    assert last.complete() and far.scan().gathered == [] and ids(far) == [NEW]
    far.quarantine(far.checkpoints()[0], "bad")
    with pytest.raises(PersistError, match="quarantined"):
        last.complete()
    assert ids(far) == []


def test_a_lost_object_is_noticed_before_its_part_counts(far, contribute, monkeypatch):
    """Somebody deleted it, or aborted its upload: the persist has failed, and is tried again."""
    real, lost = upload.upload_file, []

    def lose_the_first(objects, source, name, pace):
        done = real(objects, source, name, pace)
        if not lost:
            lost.append(name)
            objects.remove(name)
        return done

    monkeypatch.setattr(upload, "upload_file", lose_the_first)
    with pytest.raises(PersistError, match="but the store has none"):
        contribute(far, Share(0, 1))
    assert contribute(far, Share(0, 1)).complete()
    assert ids(far) == [NEW]


def test_without_file_locks_the_first_node_publishes(directory, contribute, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(layout.fcntl, "flock", refuse)
    first, second = (contribute(directory, Share(node, 2)) for node in (0, 1))
    assert second.complete() is None and directory.sweep() == []
    assert first.complete() == second.complete() is not None
    assert_sound(directory)


def test_a_publication_whose_rename_is_refused_can_be_repeated(directory, contribute):
    """What all have written is kept: the others' memory may hold something else by now."""
    publish(directory, OLD)
    target = Path(path_in(directory, COPY))
    for node in (0, 1):
        last = contribute(directory, Share(node, 2, target=str(target)))
    (target / "theirs").mkdir(parents=True)
    with pytest.raises(PersistError, match="Is a directory"):
        last.complete()
    assert assert_sound(directory) == [OLD]
    shutil.rmtree(target)
    assert last.complete() and assert_sound(directory) == [NEW]
    assert_clean(directory)


@pytest.mark.parametrize("place", ["directory", "plain", "s3"])
def test_nodes_that_complete_a_checkpoint_at_once_publish_it_once(request, s3_server, fast_path, contribute, place):
    """Each in a process of its own where no client is in the way; the others find it published."""
    if place == "s3":
        request.getfixturevalue("s3")
    url = {"directory": fast_path / "dir", "plain": f"plain://{fast_path}/run", "s3": "s3://bucket/run"}[place]

    stores = [open_store(url) for _ in range(3)]

    def publish_as(node: int, id: SaveId) -> str:
        end = time.monotonic() + 60
        part = contribute(stores[node], Share(node, 3, target=path_in(stores[node], COPY)), id)
        while (manifest := part.complete()) is None:
            assert time.monotonic() < end, part.missing()
        return manifest.to_json()

    for history in range(1, 2 if place == "s3" else 5):
        id = SaveId(history, 7)
        if place == "directory":
            published = at_once(3, lambda node, id=id: publish_as(node, id))
        else:
            with ThreadPoolExecutor(3) as pool:
                published = [*pool.map(publish_as, range(3), [id] * 3)]
        assert published[0] and published == published[:1] * 3 and ids(stores[0]) == [id]
    for store in stores:
        store.close()
