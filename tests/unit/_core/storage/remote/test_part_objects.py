"""Several nodes upload one checkpoint: it counts once all parts are present, and then at once and complete."""

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

OLD, NEW = SaveId(0, 7), SaveId(1, 7)
COPY = "copies/model.pt"


@pytest.fixture
def contribute(tmp_path):
    def do(store, id, share, world_size=0):
        images = images_of_node(tmp_path / f"image-{id.history}-{id.step}-of-{share.node}", id, share.node)
        details = {"attempt": share.attempt}
        return store.contribute(
            PublishRequest(id, images, world_size=world_size or share.nodes, details=details), share
        )

    return do


def ids(store):
    for stored in store.checkpoints():
        store.verify(stored)
    assert store.scan().damaged == []
    return [stored.id for stored in store.checkpoints()]


def test_the_last_uploaded_part_completes_a_checkpoint(near, contribute):
    contributions, order, target = [], (2, 0, 1), COPY
    for count, node in enumerate(order):
        assert ids(near) == [] and near.scan().gathered == [NEW] * bool(count)
        contributions.append(contribute(near, NEW, Share(node, 3, target=target)))
        assert contributions[-1].missing() == sorted(order[count + 1 :])
        manifest = contributions[-1].complete()
        assert (manifest is None) == (count < 2)
    assert ids(near) == [NEW] and near.scan().gathered == []
    assert [contribution.complete() for contribution in contributions] == [manifest] * 3
    assert {entry.name for entry in manifest.files} > {"model.pt", "rank_0.pt", "rank_1.pt", "rank_2.pt"}
    assert manifest.target == target and manifest.details == {"attempt": ""}
    assert contribute(near, NEW, Share(1, 3, target=target)).complete() == manifest


def test_uploaded_parts_of_unlike_attempts_or_jobs_are_not_joined(near, contribute):
    contribute(near, NEW, Share(0, 2, "a"))
    for share in (Share(1, 2, "b"), Share(1, 3, "a"), Share(1, 2, "a", "copy.pt")):
        assert contribute(near, NEW, share).complete() is None
    odd = contribute(near, NEW, Share(1, 2, "a"), world_size=5)
    with pytest.raises(BadCheckpoint, match="numbers of ranks"):
        odd.complete()
    [why] = [each.why for each in near.settle() if "cannot be published" in str(each)]
    assert "cannot be published: the parts of step 7" in why
    assert ids(near) == []


def test_a_lost_object_is_noticed_before_its_part_counts(near, contribute, monkeypatch):
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
        contribute(near, NEW, Share(0, 1))
    assert contribute(near, NEW, Share(0, 1)).complete()
    assert ids(near) == [NEW]


def test_leftover_uploaded_parts_are_removed_and_none_published_that_was_quarantined(near, contribute):
    contribute(near, OLD, Share(0, 2))
    assert near.sweep() == [] and near.scan().gathered == [OLD]
    for node in (0, 1):
        last = contribute(near, NEW, Share(node, 2))
    assert last.complete() and near.scan().gathered == [] and ids(near) == [NEW]
    near.quarantine(near.checkpoints()[0], "bad")
    with pytest.raises(PersistError, match="quarantined"):
        last.complete()
    assert ids(near) == []


def test_complete_uploaded_parts_are_published_by_the_next_reader(near, contribute):
    """All nodes were killed when they had written their parts."""
    for node in (0, 1):
        contribute(near, OLD, Share(node, 2)).complete()
    assert near.settle() == []
    contribute(near, NEW, Share(0, 2, target=COPY))
    assert [(each.id, each.why) for each in near.settle()] == [(NEW, "it lacks the parts of 1 of 2 nodes: 1")]
    assert ids(near) == [OLD] and near.scan().gathered == [NEW]
    contribute(near, NEW, Share(1, 2, target=COPY))
    [manifest] = near.settle()
    assert (manifest.id, manifest.target) == (NEW, COPY) and ids(near) == [NEW]
    assert near._objects.sizes("copies") == {}, "who only finds the parts was not asked for a copy"
    assert near.settle() == [] and near.scan().gathered == []


@pytest.mark.parametrize(("store", "rounds"), [("memory", 5), ("plain", 5), ("s3", 1)], indirect=["store"])
def test_concurrent_publishers_at_a_url_publish_once(store, contribute, rounds):
    stores = [store, *(RemoteStore(str(store.path)) for _ in range(2))]

    def publish(id, node):
        part, end = contribute(stores[node], id, Share(node, 3)), time.monotonic() + 60
        while (manifest := part.complete()) is None:
            assert time.monotonic() < end
            time.sleep(0.01)
        return manifest

    for history in range(1, rounds + 1):
        id = SaveId(history, 7)
        with ThreadPoolExecutor(3) as pool:
            first, *others = pool.map(publish, [id] * 3, range(3))
        assert others == [first, first] and ids(store) == [id]
    for other in stores[1:]:
        other.close()
