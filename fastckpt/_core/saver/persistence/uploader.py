"""Copies durable checkpoints of the directory to a second, remote store, in the background."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fastckpt._core import metrics
from fastckpt._core.byte_sizes import decimal
from fastckpt._core.error_codes import coded
from fastckpt._core.format.ids import SaveId
from fastckpt._core.policy.retention import KeepAll, Policy
from fastckpt._core.retention import retire
from fastckpt._core.saver.persistence.opening import Opening
from fastckpt._core.saver.persistence.tenure import Tenure
from fastckpt._core.saver.stats import Copies
from fastckpt._core.storage.image_source import ImageSource, PublishRequest
from fastckpt._core.storage.store import Store, StoredCheckpoint
from fastckpt.errors import FastckptError, Superseded

logger = logging.getLogger("fastckpt")

FIRST_PAUSE = 1.0
"""Seconds before the first retry; each further one waits twice as long."""
LONGEST_PAUSE = 60.0
AT_THE_END = 60.0
"""Seconds of the end of a job in which an upload that has failed is tried again."""
UNSEEN = 1000
"""Histories that a remote store which cannot be read may hold beyond those that are known."""


class Uploader:
    """The way from one store, which is fast, to another.

    One checkpoint is on its way at a time, and none waits in a queue. When one has arrived, the newest that the fast
    store holds goes next. Others that became durable meanwhile are passed over. While one is on its way, `busy` names
    it, so that retention leaves it. Trouble is reported and retried for as long as the job lasts; the fast store goes
    on without regard to it. Without a remote store all this does nothing.

    Attributes:
        policy: Retention policy of the remote store.
        remote: That store, and `tenure` the right to publish there; None without one.
        copies: Outcome of the copies; its ``newest`` is the remote store's, as far as is known.
        trouble: Reason why the last upload failed; empty if it did not.
    """

    def __init__(self, fast: Store, remote: Store | None, location: str, tenure: Tenure | None) -> None:
        self.policy: Policy = KeepAll()
        self.copies = Copies(location)
        self.trouble = ""
        self.busy: SaveId | None = None
        self._fast = fast
        self.remote = remote
        self.tenure = tenure
        self._failures = 0
        self._news = False
        self._hurry = asyncio.Event()
        self._last_attempt = math.inf
        self._task: asyncio.Task[None] | None = None
        self.pool = ThreadPoolExecutor(1, "fastckpt-upload")

    def read_back(self) -> None:
        """Compare, from now on, each upload with the bytes that the remote store gives back, before it counts there."""
        if self.remote is not None:
            self.remote.read_back = True

    async def open(self, known: SaveId | None) -> int:
        """Look for the newest checkpoint in the remote store, and begin to upload a newer one.

        Args:
            known: The newest checkpoint that is held nearer.

        Returns the newest history that the remote store may hold. Raises PersistError if it does not answer and
        nothing is held nearer: to start afresh then might be to start beside checkpoints that exist.
        """
        if self.remote is None:
            return 0
        try:
            await self._in_thread(self._look)
        except (FastckptError, OSError) as error:
            if known is None:
                raise
            logger.warning(coded("the job goes on without its remote store for now: %s", "FC-026"), error)
            self.trouble = str(error)
        self.look()
        if self.trouble and known is not None:
            # The unreadable store may hold newer histories: a number far above them keeps ids in order.
            return known.history + UNSEEN
        return self.copies.newest.history if self.copies.newest else 0

    def look(self) -> None:
        """Something may have become durable in the fast store."""
        # A flag, not a queue: only the newest checkpoint is worth uploading.
        self._news = True
        if self.remote is not None and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run())

    def forget(self) -> None:
        """Checkpoints of the remote store were found bad: look again for its newest."""
        self.copies.newest = None
        self.look()

    @property
    def awaited(self) -> str:
        """Description of the upload that the end of the job waits for; empty for none."""
        if self.remote is None or self._task is None or self._task.done():
            return ""
        what = f"{self.busy} is on its way to" if self.busy else "the newest checkpoint is to be in"
        return f"{what} {self.remote.path}"

    async def finish(self, seconds: float) -> bool:
        """Wait until the newest checkpoint has arrived, or cannot; False if neither is so after ``seconds``."""
        if self.remote is None:
            return True
        # The pauses begin small again, so that the end of the job has several attempts.
        self._failures = 0
        self._last_attempt = time.monotonic() + AT_THE_END
        self._hurry.set()
        self.look()
        assert self._task is not None
        done, _ = await asyncio.wait([self._task], timeout=seconds)
        if self.trouble or not done:
            why = self.trouble or f"it takes longer than {seconds:.0f} s"
            text = coded("the newest checkpoint is not in %s: %s. The next job uploads it.", "FC-026")
            logger.error(text, self.remote.path, why)
        return bool(done)

    def close(self, *, wait: bool) -> None:
        """End the thread; with ``wait``, after its present work."""
        if self._task is not None:
            self._task.cancel()
        self.pool.shutdown(wait=wait, cancel_futures=True)
        if wait and self.remote is not None:
            self.remote.close()

    async def _run(self) -> None:
        """Upload until the remote store holds the newest checkpoint: no error may end this loop."""
        while self._news:
            self._news = False
            work = asyncio.ensure_future(self._in_thread(self._upload_newest))
            await asyncio.wait([work])
            self.busy = None
            if error := work.exception():
                await self._failed(error)
            else:
                self._failures, self.trouble = 0, ""

    async def _failed(self, error: BaseException) -> None:
        self._failures += 1
        metrics.counts["upload_failures"] += 1
        self.copies.failures, self.copies.last_failure = self.copies.failures + 1, str(error)
        self.trouble = f"the remote store is behind (attempt {self._failures}): {error}"
        metrics.event("upload_failed", attempt=self._failures, error=str(error))
        logger.warning("%s", self.trouble)
        # No retry: another job owns the store now, for good.
        if isinstance(error, Superseded):
            return
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (self._failures - 1))
        if self._hurry.is_set() and time.monotonic() + pause > self._last_attempt:
            return
        self._news = True
        if self._hurry.is_set():
            await asyncio.sleep(pause)
            return
        # The pause, which the end of the job cuts short.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), pause)

    def _in_thread(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(self.pool, work)

    def _look(self) -> None:
        assert self.remote is not None
        self.copies.newest = max((stored.id for stored in self.remote.checkpoints()), default=None)
        if self.tenure is not None:
            self.tenure.saw(self.copies.newest)

    def _upload_newest(self) -> None:
        """Upload the newest checkpoint of the fast store, unless the remote one has it, or one that is newer."""
        assert self.remote is not None and self.tenure is not None
        # 1. both stores' newest   2. the right to publish in the remote one   3. upload   4. the right again: only then
        # does it count   5. retention there
        if self.copies.newest is None:
            self._look()
        # Looked for at each attempt: retention may have deleted the former newest.
        found: Sequence[StoredCheckpoint] = self._fast.known()
        if not found or (self.copies.newest is not None and found[0].id <= self.copies.newest):
            return
        newest = found[0]
        # Before the first read, so that retention in the directory leaves these files until they are uploaded.
        self.busy = newest.id
        start = time.perf_counter()
        self.tenure.hold(Opening.of(newest.id, {**newest.manifest.details, "parent": newest.manifest.parent}))
        with metrics.phase("upload", step=newest.id.step):
            self._publish(newest)
        # After the manifest is written: if another job has opened a
        # newer history meanwhile, this one does not count as uploaded.
        self.tenure.check()
        size, seconds = newest.manifest.size, time.perf_counter() - start
        self.copies.arrived(newest.id, size)
        history, step = newest.id
        metrics.event("uploaded", history=history, step=step, bytes=size, seconds=seconds, remote=self.copies.location)
        logger.info("uploaded %s: %s in %.2f s", newest.id, decimal(size), seconds)
        retire(self.remote, self.policy, lambda: None)

    def _publish(self, stored: StoredCheckpoint) -> None:
        """Publish the very bytes that the manifest names: others are BadSource, and do not count."""
        assert self.remote is not None
        kept = stored.manifest
        paths = self._fast.files(stored, Path())
        files = {entry.name: ImageSource(paths[entry.name], entry.size, entry.digest) for entry in kept.files}
        self.remote.publish(PublishRequest(kept.id, files, "", kept.parent, kept.world_size, kept.details))
