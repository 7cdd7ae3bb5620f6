"""Stores at URLs of several protocols, and what is published to them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from fastckpt._core.format.ids import SaveId
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.remote.remote_store import RemoteStore
from tests.unit._core.storage.checkpoints import images
from tests.unit._core.storage.s3 import S3


class Plain(LocalFileSystem):
    """Some other file system that fsspec opens: files in directories, and no multipart uploads."""

    protocol = "plain"


fsspec.register_implementation("plain", Plain, clobber=True)


@contextmanager
def opened(url: str) -> Iterator[RemoteStore]:
    store = RemoteStore(url)
    try:
        yield store
    finally:
        store.close()


@pytest.fixture(params=["s3", "memory", "plain"])
def store(request: pytest.FixtureRequest, tmp_path: Path, s3_server: str) -> Iterator[RemoteStore]:
    """The same store over different protocols."""
    if request.param == "s3":
        request.getfixturevalue("s3")
    place = {"s3": "bucket", "memory": tmp_path.name, "plain": f"{tmp_path}/plain"}[request.param]
    with opened(f"{request.param}://{place}/run1") as made:
        yield made


@pytest.fixture
def near(tmp_path: Path) -> Iterator[RemoteStore]:
    """A store that answers at once, for what is decided by names and sizes alone."""
    with opened(f"memory://{tmp_path.name}/run1") as made:
        yield made


@pytest.fixture
def on_s3(s3: S3) -> Iterator[RemoteStore]:
    with opened("s3://bucket/run1") as made:
        yield made


def publish(store: RemoteStore, folder: Path, id: SaveId, **options: Any) -> None:
    store.publish(PublishRequest(id, images(folder / f"image-{id.history}-{id.step}", id), **options))


def ids(store: RemoteStore) -> list[SaveId]:
    return [stored.id for stored in store.checkpoints()]
