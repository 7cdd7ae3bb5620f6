"""A store that accepts requests and answers none: reported soon, and the error comes before any cleaning up."""

import os

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.remote import filesystem as client_module
from fastckpt._core.storage.remote import objects as objects_module
from fastckpt._core.storage.remote import wait_notice as waiting_module
from fastckpt._core.storage.remote.remote_store import RemoteStore
from fastckpt.errors import PersistError
from tests.e2e.ddp.conftest import said  # noqa: F401 (fixture)
from tests.unit._core.storage.s3 import S3, Fault, s3, s3_server  # noqa: F401 (fixtures)

MIB = 2**20


@pytest.fixture
def store(s3: S3, monkeypatch: pytest.MonkeyPatch) -> RemoteStore:  # noqa: F811
    monkeypatch.setattr(objects_module, "PART", 5 * MIB)
    monkeypatch.setattr(waiting_module, "FIRST", 0.25)
    return RemoteStore("s3://bucket/run")


def test_a_hanging_upload_is_reported_and_cleaned_up_after_its_error(store, s3, said, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(client_module, "REQUEST_DEADLINE", 5.0)
    monkeypatch.setattr(client_module, "SLOWEST", 100 * MIB)
    model = tmp_path / "model.pt"
    model.write_bytes(os.urandom(11 * MIB))
    hang = s3.inject(Fault("hang", "PUT|DELETE", r"partNumber=2|checkpoint-1.*(uploadId|manifest)", times=10**6))
    with pytest.raises(PersistError, match=r"no answer in 5 s \(to upload part [123] of checkpoint-1/.*model\.pt\)"):
        store.publish(PublishRequest(SaveId(1, 1), {"model.pt": model}))
    assert not store._objects._cleaner.submit(int).done(), "that takes as long again"
    lines = [line for line in said.messages if "has not answered for" in line]
    assert any("run has not answered for 0 s (to upload part " in line and "up to 5 s (FC-" in line for line in lines)
    store._objects._cleaner.submit(int).result(60)
    assert "the next sweep will: TimeoutError: no answer in 5 s (to abort checkpoint-1/" in said.text
    assert hang.injected > 2
    s3.proxy.faults.clear()
    assert len(store.sweep()) == 1 and s3.objects() == {} and s3.uploads() == []
    store.publish(PublishRequest(SaveId(1, 1), {"model.pt": model}))
    assert [stored.id for stored in store.scan().places] == [(1, 1)]
    store.close()


def test_a_store_that_answers_late_is_reported_at_growing_intervals(store, s3, said):  # noqa: F811
    s3.inject(Fault("stall", "GET", times=10**6))
    for _ in range(4):
        assert store.checkpoints() == []
    told = [line for line in said.messages if "has not answered" in line or "answers again" in line]
    assert [("not answered" in line) for line in told] == [True, False] * (len(told) // 2)
    assert 2 <= len(told) < 2 * len(s3.proxy.requests), "each time it has twice as long"
    store.close()
