"""The objects under one URL, through fsspec: whole uploads of files, ranged reads, listings, deletions."""

import errno
import inspect
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from fastckpt._core.storage.remote.client_errors import LoggedErrors
from fastckpt._core.storage.remote.filesystem import RemoteFilesystem
from fastckpt._core.storage.remote.multipart import LARGEST_COUNT, Multipart, abort_abandoned
from fastckpt._core.storage.remote.object_sink import ObjectSink, StreamSink
from fastckpt.errors import BadCheckpoint

PART = 16 * 2**20
"""Bytes that travel in one request, unless a file would have too many parts."""
THREADS = 8
"""Requests of one store that are on their way at a time."""
READS = 4
"""Parts of a file that are read ahead."""
COPY_DEADLINE = 1800.0
"""Seconds in which a store copies an object of its own."""

CONDITIONAL = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"})
"""Protocols that make an object only if there is none, where their client can ask for that."""
DIRECTORIES = frozenset({"webdav", "dav", "smb"})
"""Protocols of servers that refuse to make a directory that is there."""


class Creation(Enum):
    """Operation in a store in which one of several callers succeeds."""

    OBJECT = "a conditional request"
    FILE = "an exclusive open"
    DIRECTORY = "a directory"
    NONE = "none"


class Objects:
    """The objects under one URL; names are relative to it. Errors are those of the protocol's client."""

    def __init__(self, url: str) -> None:
        """Raise ConfigError if nothing that is installed opens such a URL."""
        self._client = RemoteFilesystem(url)
        self._root, self._url, self.has_buckets = self._client.root, self._client.url, self._client.has_buckets
        self._finds = self._client.has_its_own("find")
        self._condition = _condition(self._client) if self._client.names & CONDITIONAL else {}
        self._pool = ThreadPoolExecutor(THREADS, "fastckpt-remote")
        # Apart from the requests: a clean-up that hangs must not take a thread from an upload.
        self._cleaner = ThreadPoolExecutor(1, "fastckpt-clean")

    def path(self, name: str) -> str:
        """The path of an object, as fsspec has it; a name that begins with "/" is not relative."""
        if name.startswith("/"):
            return name[1:] if self.has_buckets else name
        return f"{self._root}/{name}".rstrip("/")

    def name(self, url: str) -> str:
        """The name of the object at a URL of this store, as `path` takes it; ConfigError if it is of another one."""
        path: str = fsspec.core.strip_protocol(url).rstrip("/")
        if path.startswith(self._root + "/"):
            return path[len(self._root) + 1 :]
        return path if path.startswith("/") else "/" + path

    def sink(self, name: str) -> ObjectSink:
        """Return a sink that makes a large object of its bytes."""
        path = self.path(name)
        if self._client.is_s3:
            return Multipart(self._client, path, self._pool)
        self._make_directory(path)
        return StreamSink(self._client, path, PART)

    def put(self, name: str, data: bytes) -> None:
        """Make an object of bytes, at once."""
        path = self.path(name)
        self._make_directory(path)
        self._client.ask(f"write {path}", "pipe_file", path, data, size=len(data))

    @property
    def creation(self) -> Creation:
        """Operation by which only one of several writers can create a name here."""
        if isinstance(self._client.fs, LocalFileSystem):
            return Creation.FILE
        if self._client.names & DIRECTORIES:
            return Creation.DIRECTORY
        return Creation.OBJECT if self._condition else Creation.NONE

    def create(self, name: str, data: bytes) -> bool:
        """Make a small object unless there is one; whether it is there by this call."""
        path = self.path(name)
        self._make_directory(path)
        try:
            if self.creation is Creation.FILE:
                with self._client.fs.open(path, "xb") as file:
                    file.write(data)
            else:
                self._client.ask(f"create {path}", "pipe_file", path, data, **self._condition)
        except OSError as error:
            # Some servers do not report which condition has failed: s3fs raises EINVAL for that.
            if isinstance(error, FileExistsError) or (error.errno == errno.EINVAL and self._is_there(path)):
                return False
            raise
        return True

    def create_directory(self, name: str) -> bool:
        """Make a directory unless it is there; whether it is there by this call."""
        path = self.path(name)
        self._make_directory(path)
        try:
            self._client.ask(f"create {path}", "mkdir", path, create_parents=False)
        # Clients have no common error for a directory that exists: look whether it is there instead.
        except Exception:
            if not self._is_there(path):
                raise
            return False
        return True

    def names(self, name: str) -> list[str]:
        """The names of all that is directly below a name, relative to it."""
        path = self.path(name)
        try:
            found = self._client.ask(f"list {path}", "ls", path, detail=False)
        except FileNotFoundError:
            return []
        return [each.rstrip("/")[len(path) + 1 :] for each in found]

    def _is_there(self, path: str) -> bool:
        return bool(self._client.ask(f"look for {path}", "exists", path))

    def _make_directory(self, path: str) -> None:
        if not self.has_buckets:
            self._client.ask("make a directory", "makedirs", path.rpartition("/")[0], exist_ok=True)

    def read(self, name: str, size: int) -> bytes | None:
        """The first bytes of a small object, at most so many; None if there is none."""
        if size == 0:
            return b""  # stores refuse to read no bytes
        try:
            return self.read_range(name, 0, size)
        except FileNotFoundError:
            return None

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """The bytes of an object from ``start`` to ``end``, or to its end."""
        path = self.path(name)
        how = self._client.reading
        data: bytes = self._client.ask(f"read {path}", "cat_file", path, start=start, end=end, size=end - start, **how)
        return data

    def parts(self, name: str, size: int) -> Iterator[bytes]:
        """The bytes of an object of that size, in order; raises BadCheckpoint if it is gone or shorter."""
        part = part_size(size)

        def fetch(offset: int) -> bytes:
            end = min(offset + part, size)
            try:
                data = self.read_range(name, offset, end)
            except FileNotFoundError as error:
                raise BadCheckpoint(f"{self.url(name)} of {size} bytes is not there") from error
            # Some servers answer a ranged request with less, without an error.
            if len(data) != end - offset:
                raise BadCheckpoint(f"{self.url(name)} ends at {offset + len(data)}; {size} bytes were saved")
            return data

        offsets = range(0, size, part)
        # A window of ranged reads: one connection alone does not use the bandwidth of a store.
        ahead = [self._pool.submit(fetch, offset) for offset in offsets[:READS]]
        for i in range(len(offsets)):
            data = ahead.pop(0).result()
            if i + READS < len(offsets):
                ahead.append(self._pool.submit(fetch, offsets[i + READS]))
            yield data

    def sizes(self, name: str) -> dict[str, int]:
        """The names of all objects below a name, relative to it, and their sizes in bytes."""
        path = self.path(name)
        found = self._client.ask(f"list {path}", "find", path, detail=True) if self._finds else dict(self._below(path))
        return {key[len(path) + 1 :]: int(info["size"]) for key, info in found.items() if key.startswith(path + "/")}

    def _below(self, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the same as fsspec's own ``find``, which takes a directory that it cannot list for an empty one."""
        try:
            found = self._client.ask(f"list {path}", "ls", path, detail=True)
        except FileNotFoundError:
            return
        for info in found:
            inner = info["name"].rstrip("/")
            if info["type"] != "directory":
                yield inner, info
            elif inner != path:
                yield from self._below(inner)

    def folders(self, name: str = "") -> list[str]:
        """The names of folders directly below a name, relative to it: they have objects below them."""
        path = self.path(name)
        try:
            found = self._client.ask(f"list {path}", "ls", path, detail=True)
        except FileNotFoundError:
            return []
        return sorted(info["name"].rstrip("/")[len(path) + 1 :] for info in found if info["type"] == "directory")

    def written_at(self, name: str) -> float:
        """Return the time at which an object was written, in seconds since the epoch; infinity if not known."""
        try:
            with self._client.told("see when an object was written"):
                return float(self._client.fs.modified(self.path(name)).timestamp())
        except (NotImplementedError, FileNotFoundError):
            # Never old enough to be swept: without a time, an upload under way cannot be excluded.
            return math.inf

    def copy(self, source: str, target: str) -> None:
        """Have the store copy an object."""
        self._make_directory(self.path(target))
        paths = self.path(source), self.path(target)
        self._client.ask(f"copy {paths[0]}", "cp_file", *paths, limit=COPY_DEADLINE)

    def remove(self, name: str) -> None:
        """Remove an object, if it is there."""
        try:
            self._client.ask(f"remove {self.path(name)}", "rm_file", self.path(name))
        except FileNotFoundError:
            pass

    def remove_all(self, name: str) -> None:
        """Remove all objects below a name."""
        for _ in self.each(lambda inner: self.remove(f"{name}/{inner}"), list(self.sizes(name))):
            pass
        # Stores with directories keep empty ones, which would be listed as unfinished places for ever.
        if not self.has_buckets and self._client.ask("see a directory", "isdir", self.path(name)):
            self._client.ask("remove a directory", "rm", self.path(name), recursive=True)

    def abort_uploads(self, is_abandoned: Callable[[str, float], bool]) -> list[str]:
        """Abort the uploads that dead writers left under way; see `abort_abandoned`. Returns their names."""
        return abort_abandoned(self._client, is_abandoned) if self._client.is_s3 else []

    def bucket_is_there(self) -> bool:
        """Return whether the bucket exists; True for a store without buckets."""
        bucket = self._root.split("/")[0]
        return not self.has_buckets or bool(self._client.ask("see whether the bucket is there", "exists", bucket))

    def url(self, name: str = "") -> str:
        """Return the URL that users know."""
        return (
            str(self._client.fs.unstrip_protocol(self.path(name)))
            if name.startswith("/")
            else f"{self._url}/{name}".rstrip("/")
        )

    def each(self, work: Callable[[str], Any], names: list[str]) -> Iterator[Any]:
        """Yield the results of ``work`` for each name; several run at a time."""
        return self._pool.map(work, names)

    def later(self, deed: str, work: Callable[[], Any]) -> None:
        """Clean up in the background: the failure itself is reported first. A failed clean-up is left to a sweep."""

        def clean() -> None:
            with LoggedErrors(f"{deed}; the next sweep will"):
                work()

        self._cleaner.submit(clean)

    def close(self) -> None:
        """End the threads, after their present work, and the connections."""
        for pool in (self._cleaner, self._pool):
            pool.shutdown(wait=True, cancel_futures=True)
        self._client.close()


def _condition(client: RemoteFilesystem) -> dict[str, Any]:
    """Options with which a client makes an object only if there is none; empty if it has none."""
    method = getattr(client.fs, "_pipe_file" if client.fs.async_impl else "pipe_file")
    known = inspect.signature(method).parameters if client.has_its_own("pipe_file") else {}
    conditions: dict[str, Any] = {"mode": "create", "overwrite": False}
    return next(({word: value} for word, value in conditions.items() if word in known), {})


def part_size(size: int) -> int:
    """Bytes of each part but the last, of an object of that size."""
    # Larger than PART only for an object that 10,000 parts of 16 MiB cannot hold.
    mebibytes = math.ceil(size / LARGEST_COUNT / 2**20)
    return max(PART, mebibytes * 2**20)
