"""Requests to a store: how many are made, and what is said and done when none is answered."""

import os
from contextlib import closing

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.policy.retention import KeepLast
from fastckpt._core.retention import retire
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.remote import filesystem as client_module
from fastckpt._core.storage.remote import objects as objects_module
from fastckpt._core.storage.remote import wait_notice as waiting_module
from fastckpt._core.storage.remote.remote_store import RemoteStore
from fastckpt.errors import PersistError
from tests.e2e.ddp.conftest import said  # noqa: F401 (fixture)
from tests.unit._core.storage.checkpoints import images
from tests.unit._core.storage.s3 import S3, Fault


def test_uploads_and_retention_make_a_bounded_number_of_requests(s3, tmp_path):
    def asked(deed, *arguments):
        before = len(s3.requests)
        deed(*arguments)
        return len(s3.requests) - before

    def publish(store, step, history=1):
        id = SaveId(history, step)
        store.publish(PublishRequest(id, images(tmp_path / f"{history}-{step}", id)))

    def keep(store, count):
        retire(store, KeepLast(count), lambda: None)

    def steps(store):
        with closing(RemoteStore(store.path)) as with_new_eyes:
            found = [stored.id.step for stored in with_new_eyes.checkpoints()]
        assert found == [stored.id.step for stored in store.known()]
        return found

    with closing(RemoteStore("s3://bucket/few")) as few, closing(RemoteStore("s3://bucket/many")) as many:
        for store, count in ((few, 3), (many, 6)):
            for step in range(1, count + 1):
                publish(store, step)
            assert len(store.checkpoints()) == count
        assert asked(publish, few, 30) == asked(publish, many, 30) <= 9
        assert asked(keep, few, 4) == asked(keep, many, 7) == 0
        one = asked(keep, many, 6)
        assert asked(keep, few, 3) == one and asked(keep, many, 3) == 3 * one
        assert steps(few) == [30, 3, 2] and steps(many) == [30, 6, 5]
        publish(many, 6, history=2)
        assert asked(keep, many, 1) and steps(many) == [6, 30], "histories are judged apart"
        assert len(many._catalog._manifests) == 2, "of what is gone nothing is remembered"


MIB = 2**20


@pytest.fixture
def store(s3: S3, monkeypatch: pytest.MonkeyPatch) -> RemoteStore:
    monkeypatch.setattr(objects_module, "PART", MIB)
    monkeypatch.setattr(waiting_module, "FIRST", 0.2)
    return RemoteStore("s3://bucket/run")


def test_a_hanging_upload_is_reported_and_cleaned_up_after_its_error(store, s3, said, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(client_module, "REQUEST_DEADLINE", 1.0)
    monkeypatch.setattr(client_module, "SLOWEST", 100 * MIB)
    model = tmp_path / "model.pt"
    model.write_bytes(os.urandom(2 * MIB + 5))
    hang = s3.inject(Fault("hang", "PUT|DELETE", r"partNumber=2|checkpoint-1.*(uploadId|manifest)", times=10**6))
    with pytest.raises(PersistError, match=r"no answer in 1 s \(to upload part [123] of checkpoint-1/.*model\.pt\)"):
        store.publish(PublishRequest(SaveId(1, 1), {"model.pt": model}))
    assert not store._objects._cleaner.submit(int).done(), "that takes as long again"
    lines = [line for line in said.messages if "has not answered for" in line]
    assert any("run has not answered for 0 s (to upload part " in line and "up to 1 s (FC-" in line for line in lines)
    store._objects._cleaner.submit(int).result(60)
    assert "the next sweep will: TimeoutError: no answer in 1 s (to abort checkpoint-1/" in said.text
    assert hang.injected > 2
    s3.faults.clear()
    assert len(store.sweep()) == 1 and s3.objects() == {} and s3.uploads() == []
    store.publish(PublishRequest(SaveId(1, 1), {"model.pt": model}))
    assert [stored.id for stored in store.scan().places] == [(1, 1)]
    store.close()


def test_a_store_that_answers_late_is_reported_at_growing_intervals(store, s3, said):  # noqa: F811
    s3.inject(Fault("stall", "GET", times=10**6))
    for _ in range(3):
        assert store.checkpoints() == []
    told = [line for line in said.messages if "has not answered" in line or "answers again" in line]
    assert [("not answered" in line) for line in told] == [True, False] * (len(told) // 2)
    assert 2 <= len(told) < 2 * len(s3.requests), "each time it has twice as long"
    store.close()
