"""Number of requests to a store: uploads cost the same with many checkpoints kept, k deletions cost k."""

from pathlib import Path

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.policy.retention import KeepLast
from fastckpt._core.retention import retire
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.remote.remote_store import RemoteStore
from fastckpt.errors import ConfigError
from tests.unit._core.storage.checkpoints import images
from tests.unit._core.storage.s3 import S3, s3, s3_server  # noqa: F401 (fixtures)


class Asked:
    """A store with ``count`` checkpoints, and how many requests it is asked."""

    def __init__(self, s3: S3, folder: Path, count: int) -> None:  # noqa: F811
        self.store, self._requests, self._folder = RemoteStore(f"s3://bucket/run{count}"), s3.proxy.requests, folder
        for step in range(1, count + 1):
            self.publish(step)
        assert len(self.store.checkpoints()) == count

    def publish(self, step: int, history: int = 1) -> int:
        before, id = len(self._requests), SaveId(history, step)
        self.store.publish(PublishRequest(id, images(self._folder / f"{history}-{step}", id)))
        return len(self._requests) - before

    def keep(self, count: int) -> int:
        before = len(self._requests)
        retire(self.store, KeepLast(count), lambda: None)
        return len(self._requests) - before

    def steps(self) -> list[int]:
        with_new_eyes = RemoteStore(self.store.path)
        found = [stored.id.step for stored in with_new_eyes.checkpoints()]
        with_new_eyes.close()
        assert found == [stored.id.step for stored in self.store.known()]
        return found


def test_uploads_and_retention_make_a_bounded_number_of_requests(s3, tmp_path):  # noqa: F811
    few, many = Asked(s3, tmp_path / "few", 4), Asked(s3, tmp_path / "many", 24)
    assert few.publish(30) == many.publish(30) <= 9
    assert few.keep(5) == many.keep(25) == 0
    one = many.keep(24)
    assert few.keep(4) == one and many.keep(21) == 3 * one
    assert few.steps() == [30, 4, 3, 2] and many.steps() == [30, *range(24, 4, -1)]
    many.publish(24, history=2)
    assert many.keep(3) and many.steps() == [24, 30, 23, 22], "histories are judged apart"
    assert len(many.store._catalog._manifests) == 4, "of what is gone nothing is remembered"
    few.store.close()
    many.store.close()


@pytest.mark.parametrize("gone", [[30], [30, 4, 3]])
def test_checkpoints_deleted_by_others_are_not_relied_upon(s3, tmp_path, gone):  # noqa: F811
    """By hand, say: the newest of what is left is never deleted."""
    asked = Asked(s3, tmp_path, 4)
    asked.publish(30)
    for step in gone:
        for key in s3.objects():
            if f"/checkpoint-{step}/" in key:
                s3.fs.rm_file(key)
    with pytest.raises(ConfigError, match="is the newest of"):
        asked.store.delete(SaveId(1, 4 if gone == [30] else 2))
    asked.store.delete(SaveId(1, 1))
    assert asked.steps() == ([4, 3, 2] if gone == [30] else [2])
    asked.store.close()
