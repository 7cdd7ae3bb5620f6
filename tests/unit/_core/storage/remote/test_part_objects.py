"""Several nodes upload one checkpoint: it counts once all parts are present, and then at once and complete."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.remote import upload
from fastckpt._core.storage.remote.remote_store import RemoteStore
from fastckpt._core.storage.share import Share
from fastckpt.errors import BadCheckpoint, PersistError
from tests.unit._core.storage.checkpoints import images_of_node
from tests.unit._core.storage.remote.test_remote_store import store  # noqa: F401 (a fixture)
from tests.unit._core.storage.s3 import s3, s3_server  # noqa: F401 (fixtures)

OLD, NEW = SaveId(0, 7), SaveId(1, 7)


def contribute(store, tmp_path, id, share):  # noqa: F811
    images = images_of_node(tmp_path / f"image-{id.history}-{id.step}-of-{share.node}", id, share.node)
    return store.contribute(
        PublishRequest(id, images, world_size=share.nodes, details={"attempt": share.attempt}), share
    )


def ids(store):  # noqa: F811
    for stored in store.checkpoints():
        store.verify(stored)
    assert store.scan().damaged == []
    return [stored.id for stored in store.checkpoints()]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3)))[::2])
@pytest.mark.parametrize("target", ["", "copies/model.pt"])
def test_the_last_uploaded_part_completes_a_checkpoint(store, tmp_path, order, target):  # noqa: F811
    contributions = []
    for count, node in enumerate(order):
        assert ids(store) == [] and store.scan().gathered == [NEW] * bool(count)
        contributions.append(contribute(store, tmp_path, NEW, Share(node, 3, target=target)))
        assert contributions[-1].missing() == sorted(order[count + 1 :])
        manifest = contributions[-1].complete()
        assert (manifest is None) == (count < 2)
    assert ids(store) == [NEW] and store.scan().gathered == []
    assert [contribution.complete() for contribution in contributions] == [manifest] * 3
    assert {entry.name for entry in manifest.files} > {"model.pt", "rank_0.pt", "rank_1.pt", "rank_2.pt"}
    assert manifest.target == target and manifest.details == {"attempt": ""}
    assert contribute(store, tmp_path, NEW, Share(1, 3, target=target)).complete() == manifest


def test_uploaded_parts_of_unlike_attempts_are_not_joined(store, tmp_path):  # noqa: F811
    contribute(store, tmp_path, NEW, Share(0, 2, "a"))
    for share in (Share(1, 2, "b"), Share(1, 3, "a"), Share(1, 2, "a", "copy.pt")):
        assert contribute(store, tmp_path, NEW, share).complete() is None
    assert ids(store) == []
    assert contribute(store, tmp_path, NEW, Share(1, 2, "a")).complete()
    assert ids(store) == [NEW]


def test_a_lost_object_is_noticed_before_its_part_counts(store, tmp_path, monkeypatch):  # noqa: F811
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
        contribute(store, tmp_path, NEW, Share(0, 1))
    assert contribute(store, tmp_path, NEW, Share(0, 1)).complete()
    assert ids(store) == [NEW]


def test_parts_of_unlike_jobs_are_refused(store, tmp_path):  # noqa: F811
    contribute(store, tmp_path, NEW, Share(0, 2))
    images = images_of_node(tmp_path / "odd", NEW, 1)
    with pytest.raises(BadCheckpoint, match="numbers of ranks"):
        store.contribute(PublishRequest(NEW, images, world_size=5), Share(1, 2)).complete()


def test_leftover_uploaded_parts_are_removed_by_the_next_publication(store, tmp_path):  # noqa: F811
    contribute(store, tmp_path, OLD, Share(0, 2))
    assert store.sweep() == [] and store.scan().gathered == [OLD]
    for node in (0, 1):
        last = contribute(store, tmp_path, NEW, Share(node, 2))
    assert last.complete() and store.scan().gathered == [] and ids(store) == [NEW]


def test_complete_uploaded_parts_are_published_by_the_next_reader(store, tmp_path):  # noqa: F811
    """All nodes were killed when they had written their parts."""
    for node in (0, 1):
        contribute(store, tmp_path, OLD, Share(node, 2)).complete()
    assert store.settle() == []
    contribute(store, tmp_path, NEW, Share(0, 2, target="copies/model.pt"))
    assert [(each.id, each.why) for each in store.settle()] == [(NEW, "it lacks the parts of 1 of 2 nodes: 1")]
    assert ids(store) == [OLD] and store.scan().gathered == [NEW]
    contribute(store, tmp_path, NEW, Share(1, 2, target="copies/model.pt"))
    [manifest] = store.settle()
    assert (manifest.id, manifest.target) == (NEW, "copies/model.pt") and ids(store) == [NEW]
    assert store._objects.sizes("copies") == {}, "who only finds the parts was not asked for a copy"
    assert store.settle() == [] and store.scan().gathered == []


def test_unlike_uploaded_parts_are_reported(store, tmp_path):  # noqa: F811
    contribute(store, tmp_path, NEW, Share(0, 2))
    store.contribute(PublishRequest(NEW, images_of_node(tmp_path / "odd", NEW, 1), world_size=5), Share(1, 2))
    [unfinished] = store.settle()
    assert unfinished.id == NEW and "cannot be published: the parts of step 7" in unfinished.why


def test_a_quarantined_checkpoint_is_not_published_again_from_its_parts(store, tmp_path):  # noqa: F811
    for node in (0, 1):
        last = contribute(store, tmp_path, NEW, Share(node, 2))
    last.complete()
    store.quarantine(store.checkpoints()[0], "bad")
    with pytest.raises(PersistError, match="quarantined"):
        last.complete()
    assert ids(store) == []


def test_concurrent_publishers_at_a_url_publish_once(store, tmp_path):  # noqa: F811
    stores = [store, *(RemoteStore(str(store.path)) for _ in range(2))]
    for history in range(1, 6):
        id = SaveId(history, 7)
        with ThreadPoolExecutor(3) as pool:
            first, *others = pool.map(lambda node: publish(stores[node], tmp_path, id, node), range(3))  # noqa: B023
        assert others == [first, first] and ids(store) == [id]
    for other in stores[1:]:
        other.close()


def publish(store, tmp_path, id, node):  # noqa: F811
    part, end = contribute(store, tmp_path, id, Share(node, 3)), time.monotonic() + 60
    while (manifest := part.complete()) is None:
        assert time.monotonic() < end
    return manifest
