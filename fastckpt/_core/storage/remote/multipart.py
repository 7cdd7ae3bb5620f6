"""Uploads one large object to S3 in parts, several at a time; nobody sees it before all are there."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from fastckpt._core.storage.remote.filesystem import RemoteFilesystem

PARALLEL = 4
"""Parts of one object that are on their way at a time."""
COMPLETION = 300.0
"""Seconds in which a store makes one object of its parts: it may have to copy them."""
LARGEST_COUNT = 10_000
"""Parts that S3 takes of one object."""


class Multipart:
    """A multipart upload. `write` gives the parts in order; `commit` makes the object, `discard` leaves nothing.

    Args:
        client: That of an S3.
        path: Bucket and key.
        pool: Threads for the parts; memory holds `PARALLEL` parts at most.
    """

    def __init__(self, client: RemoteFilesystem, path: str, pool: ThreadPoolExecutor) -> None:
        self._client, self._path = client, path
        self._pool = pool
        bucket, key, _ = client.fs.split_path(path)
        self._object = {"Bucket": bucket, "Key": key}
        started = client.ask(f"begin {path}", "call_s3", "create_multipart_upload", **self._object)
        self._upload = {**self._object, "UploadId": started["UploadId"]}
        self._running: deque[Future[dict[str, Any]]] = deque()
        self._parts: list[dict[str, Any]] = []
        self._count = 0

    def write(self, part: bytes) -> None:
        """Send a part, of 5 MiB or more but for the last; waits while enough others are on their way."""
        # Back pressure: without it the reader would hold the whole file in memory before a slow store.
        while len(self._running) >= PARALLEL:
            self._parts.append(self._running.popleft().result())
        self._count += 1
        self._running.append(self._pool.submit(self._send, self._count, part))

    def commit(self) -> None:
        """Make the object of its parts."""
        self._parts += [running.result() for running in self._running]
        # S3 makes the object only now, from parts in order of their numbers: until then nobody sees any of it.
        parts = {"Parts": self._parts}
        try:
            self._ask("complete", "complete_multipart_upload", limit=COMPLETION, MultipartUpload=parts)
        except FileNotFoundError:
            # No such upload: it was completed before, and the answer was lost. Sizes are checked before any manifest.
            pass

    def discard(self) -> None:
        """Give the upload up. Waits for parts on their way: one that came after the end would stay, and cost."""
        for running in self._running:
            running.cancel()
        wait(self._running)
        self._ask("abort", "abort_multipart_upload")

    def _send(self, number: int, part: bytes) -> dict[str, Any]:
        sent = self._ask(f"upload part {number} of", "upload_part", size=len(part), PartNumber=number, Body=part)
        return {"PartNumber": number, "ETag": sent["ETag"]}

    def _ask(self, deed: str, method: str, **options: Any) -> Any:
        return self._client.ask(f"{deed} {self._path}", "call_s3", method, **self._upload, **options)


def abort_abandoned(client: RemoteFilesystem, is_abandoned: Callable[[str, float], bool]) -> list[str]:
    """Abort uploads that dead writers left under way; returns their names.

    Args:
        client: That of an S3; uploads below its root are looked at.
        is_abandoned: Called with a name relative to the root, and the time when the upload began.
    """
    bucket, prefix, _ = client.fs.split_path(client.root + "/")
    answer = client.ask("list uploads", "call_s3", "list_multipart_uploads", Bucket=bucket, Prefix=prefix)
    aborted = []
    for upload in answer.get("Uploads") or []:
        key = upload["Key"]
        name = key.removeprefix(prefix)
        # Uploads have no place in a listing of objects, and are paid for until they are aborted.
        if key.startswith(prefix) and is_abandoned(name, upload["Initiated"].timestamp()):
            which = {"Bucket": bucket, "Key": key, "UploadId": upload["UploadId"]}
            client.ask("abort an upload", "call_s3", "abort_multipart_upload", **which)
            aborted.append(name)
    return aborted
