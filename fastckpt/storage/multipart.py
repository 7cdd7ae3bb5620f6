"""Uploads one large object to S3 in parts, several at a time; nobody sees it before all are there."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

PARALLEL = 4
"""Parts of one object that are on their way at a time."""
DEADLINE = 300.0
"""Seconds for one part, with all retries of the client."""
LIST_DEADLINE = 45.0
"""Seconds for a list of uploads."""
LARGEST_COUNT = 10_000
"""Parts that S3 takes of one object."""


class Multipart:
    """A multipart upload. `write` gives the parts in order; `commit` makes the object, `discard` leaves nothing.

    Args:
        fs: An s3fs file system.
        path: Bucket and key.
        pool: Threads for the parts; memory holds `PARALLEL` parts at most.
    """

    def __init__(self, fs: Any, path: str, pool: ThreadPoolExecutor) -> None:
        self._fs = fs
        self._pool = pool
        bucket, key, _ = fs.split_path(path)
        self._object = {"Bucket": bucket, "Key": key}
        started = fs.call_s3("create_multipart_upload", **self._object, timeout=DEADLINE)
        self._upload = {**self._object, "UploadId": started["UploadId"]}
        self._running: deque[Future[dict[str, Any]]] = deque()
        self._parts: list[dict[str, Any]] = []
        self._count = 0

    def write(self, part: bytes) -> None:
        """Send a part, of 5 MiB or more but for the last; waits while enough others are on their way."""
        while len(self._running) >= PARALLEL:
            self._parts.append(self._running.popleft().result())
        self._count += 1
        self._running.append(self._pool.submit(self._send, self._count, part))

    def commit(self) -> None:
        """Make the object of its parts."""
        self._parts += [running.result() for running in self._running]
        parts = {"Parts": self._parts}
        try:
            self._fs.call_s3("complete_multipart_upload", **self._upload, MultipartUpload=parts, timeout=DEADLINE)
        except FileNotFoundError:
            # No such upload: it was completed before, and the answer was lost. Sizes are checked before any manifest.
            pass

    def discard(self) -> None:
        """Give the upload up. Waits for parts on their way: one that came after the end would stay, and cost."""
        for running in self._running:
            running.cancel()
        wait(self._running)
        self._fs.call_s3("abort_multipart_upload", **self._upload, timeout=DEADLINE)

    def _send(self, number: int, part: bytes) -> dict[str, Any]:
        sent = self._fs.call_s3("upload_part", **self._upload, PartNumber=number, Body=part, timeout=DEADLINE)
        return {"PartNumber": number, "ETag": sent["ETag"]}


def abort_abandoned(fs: Any, root: str, is_abandoned: Callable[[str, float], bool]) -> list[str]:
    """Abort uploads that dead writers left under way; returns their names.

    Args:
        fs: An s3fs file system.
        root: Bucket and prefix below which to look.
        is_abandoned: Tells it from a name relative to ``root``, and the time of its beginning.
    """
    bucket, prefix, _ = fs.split_path(root + "/")
    answer = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, timeout=LIST_DEADLINE)
    aborted = []
    for upload in answer.get("Uploads") or []:
        key = upload["Key"]
        name = key.removeprefix(prefix)
        if key.startswith(prefix) and is_abandoned(name, upload["Initiated"].timestamp()):
            fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload["UploadId"], timeout=DEADLINE)
            aborted.append(name)
    return aborted
