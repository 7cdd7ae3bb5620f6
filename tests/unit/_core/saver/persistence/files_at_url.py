"""A store at a URL whose objects are files, and which refuses reads as a test says."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from fastckpt._core.storage.store import open_store


class FilesAtUrl(LocalFileSystem):
    """As another file system that fsspec opens."""

    protocol = "refusing"
    pattern: ClassVar[re.Pattern[str]] = re.compile("")
    times: ClassVar[int] = 0
    refused: ClassVar[int] = 0

    @classmethod
    def refuse(cls, pattern: str = "", times: int = 10**6) -> None:
        """Refuse so many reads of what has such names; none ends it."""
        FilesAtUrl.pattern, FilesAtUrl.times, FilesAtUrl.refused = re.compile(pattern), times, 0

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        self._check(path)
        return super().ls(path, detail, **options)

    def cat_file(self, path: str, *arguments: Any, **options: Any) -> Any:
        self._check(path)
        return super().cat_file(path, *arguments, **options)

    def _check(self, path: str) -> None:
        if FilesAtUrl.refused < FilesAtUrl.times and FilesAtUrl.pattern.search(path):
            FilesAtUrl.refused += 1
            raise PermissionError(13, "Forbidden", path)


fsspec.register_implementation("refusing", FilesAtUrl, clobber=True)


@pytest.fixture(name="url")
def url_of_files(tmp_path: Path) -> Iterator[str]:
    """The URL of a store that refuses nothing yet."""
    FilesAtUrl.refuse(times=0)
    yield f"refusing://{tmp_path}/bucket/run"
    FilesAtUrl.refuse(times=0)


def place_of(url: str) -> Path:
    """The directory with the objects of a store."""
    return Path(url.partition("://")[2])


def newest_at(url: str) -> int:
    store = open_store(url)
    try:
        return max((stored.id.step for stored in store.checkpoints()), default=0)
    finally:
        store.close()
