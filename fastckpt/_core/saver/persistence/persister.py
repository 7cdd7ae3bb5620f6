"""Persists slots in the background: one at a time, and again after a failure."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from fastckpt._core import metrics
from fastckpt._core.byte_sizes import decimal
from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import Manifest
from fastckpt._core.saver.persistence.node_parts import NodeParts
from fastckpt._core.saver.persistence.pending_persist import PendingPersist, Urgency
from fastckpt._core.saver.persistence.persist_job import PersistJob
from fastckpt._core.saver.persistence.tenure import Tenure
from fastckpt._core.saver.slot import Slot
from fastckpt._core.saver.stats import SaverStats
from fastckpt._core.storage.image_source import BadSource
from fastckpt._core.storage.store import Store
from fastckpt.errors import FastckptError, Superseded

logger = logging.getLogger("fastckpt")

ATTEMPTS = 6
REMEMBERED = 64
"""Number of persists that are remembered, for ranks that ask for the same one later."""
LAST_LOOK = 1.0
"""Seconds between two looks, at the end of a job, for checkpoints that other nodes made durable meanwhile."""
FIRST_PAUSE = 0.5
"""Seconds before the first retry; each further one waits twice as long."""


class Persister:
    """The way from memory to the storage of one checkpoint directory.

    A slot is pinned from `submit` until it is durable, so that every requested checkpoint becomes durable. Saves that
    cannot have a slot meanwhile are skipped, with the reason. One that newer ones may overtake is pinned when its
    persist begins. While storage is in trouble nothing is pinned, so that memory stays new, and only the newest
    checkpoint is tried again.

    Args:
        storage: The store of the checkpoint directory.
        tenure: The right to publish there.
        newest_slot: The slot with the newest whole checkpoint.
        stats: Counts for the report.
        first: True if this is the first node.
        alone: True if it is the only one.
        on_durable: Called when a checkpoint has become durable, and waited for.

    Attributes:
        owed: The pending persist: the next one, unless a newer save is persisted.
        newest_history: The newest history that was opened, or had a part of a node, when this was opened.
    """

    def __init__(
        self,
        storage: Store,
        tenure: Tenure,
        newest_slot: Callable[[], Slot | None],
        stats: SaverStats,
        *,
        first: bool,
        alone: bool,
        on_durable: Callable[[], Awaitable[None]],
    ) -> None:
        self._first = first
        self.storage, self.tenure = storage, tenure
        self.stats = stats
        self.news: list[SaveId] = []
        self.trouble = ""
        self._on_durable = on_durable
        self.newest_history = 0
        self.owed = PendingPersist(self.stats, self._pay, lambda: bool(self._jobs), alone=alone)
        self._newest_slot = newest_slot
        self._jobs: list[PersistJob] = []
        self._done: deque[tuple[SaveId, str]] = deque(maxlen=REMEMBERED)
        self._peers = NodeParts(lambda id: self.durable is not None and self.durable > id, self._complain)
        self._task: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        # One thread: one persist has the whole rate of the device, and is durable before the next begins.
        self.pool = ThreadPoolExecutor(1, "fastckpt-persist")

    def assume(self, *, first: bool, alone: bool) -> None:
        """Take this node's part in a new round; as the arguments of the constructor."""
        self._first, self.owed.alone = first, alone

    async def open(self) -> SaveId | None:
        """Look for durable checkpoints; returns the newest id, if there is one."""
        # The first node sweeps later, when it holds the history's record: another job may be publishing until then.
        look = partial(_look, self.storage)
        # Not in the thread that persists: the workers of a new round do not wait for the last flush.
        self.stats.durable, self.newest_history = await asyncio.get_running_loop().run_in_executor(None, look)
        self.tenure.saw(self.durable)
        return self.durable

    def look_again(self, then: Callable[[], None]) -> None:
        """Look again for durable checkpoints, since some were found bad; then call ``then``."""
        self._looking = asyncio.create_task(self._look_again(then))

    async def _look_again(self, then: Callable[[], None]) -> None:
        look = asyncio.get_running_loop().run_in_executor(self.pool, self.storage.checkpoints)
        await asyncio.wait([look])
        if error := look.exception():
            logger.warning("the durable checkpoints could not be listed: %s", error)
            return
        durable = {stored.id for stored in look.result()}
        self.stats.durable = max(durable, default=None)
        self._done = deque([entry for entry in self._done if entry[0] in durable], maxlen=REMEMBERED)
        then()

    @property
    def durable(self) -> SaveId | None:
        """The newest checkpoint that is durable."""
        return self.stats.durable

    @property
    def waiting(self) -> int:
        """Number of persists that wait, run, or need the other nodes."""
        return len(self._jobs) + self._peers.waiting

    def submit(self, slot: Slot, target: str = "", urgency: Urgency = Urgency.LASTING) -> None:
        """Persist the checkpoint in ``slot`` with its model at ``target``, unless it is or will be there already.

        An empty target is the path that the first rank gave when it saved, or the default.
        """
        if slot.id is None:
            return
        self.stats.want(slot.id)
        if urgency is Urgency.LASTING:
            self._submit(slot, target)
        elif all(slot.id > id for id in self._on_their_way):
            if self._jobs and self._jobs[0].attempts:
                self._jobs[0].attempts = 1
            self.owed.want(slot.id, agreed=urgency is Urgency.AGREED)

    def _pay(self) -> None:
        """Persist the newest checkpoint in memory, if it is as new as the one that is to be persisted next."""
        newest = self._newest_slot()
        if newest is not None and newest.id is not None and newest.id >= (self.owed.save or newest.id):
            self._submit(newest, "", lasting=False)
        self.owed.forget()

    @property
    def _on_their_way(self) -> list[SaveId]:
        """Return the saves that are durable, are being persisted, or wait for other nodes."""
        durable = [self.durable] if self.durable else []
        return durable + [job.id for job in self._jobs] + [id for id, _ in self._peers.all]

    def flush(self, slot: Slot, *, overtaken: bool = True) -> None:
        """Persist the checkpoint in ``slot`` if it is newer than all that are durable or on their way.

        With ``overtaken`` false, those on their way do not count: other nodes may lack a part of them.
        """
        if slot.id is None:
            return
        self.stats.want(slot.id)
        on_their_way = self._on_their_way
        newer = on_their_way if overtaken else filter(None, [self.durable])
        if slot.id not in on_their_way and all(slot.id > id for id in newer):
            metrics.event("flush_started", step=slot.id.step)
            self._submit(slot, "", flush=True)

    def request(self, slot: Slot) -> bool:
        """Persist the checkpoint in ``slot`` since a user asks for it while workers run; False if there is no need.

        A node alone does so once no other persist is under way, and pins nothing until then, so that saves find slots;
        it takes the newest then. Of several nodes each persists this very one, as all have been asked to.
        """
        if slot.id is None or any(slot.id <= id for id in self._on_their_way):
            return False
        if self.owed.alone:
            self.submit(slot, urgency=Urgency.OVERTAKABLE)
        else:
            self.flush(slot)
        return True

    def _submit(self, slot: Slot, target: str, *, flush: bool = False, lasting: bool = True) -> None:
        assert slot.id is not None
        job = PersistJob(slot, slot.id, target or slot.target, flush, lasting)
        self.owed.paid(job.id)
        known = [*self._done, *self._peers.all, *((j.id, j.target) for j in self._jobs)]
        # Each rank reports the same save, and a flush may name one that was submitted before.
        if (job.id, job.target) in known:
            return
        if lasting:
            self.stats.asked.add((job.id, job.target))
        if self._jobs and self._jobs[0].attempts:
            self._jobs[0].attempts = 1  # a retry takes the newest checkpoint anyway: let it try again
            self._jobs[0].flush |= flush
            return
        job.pin()
        self._jobs.append(job)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    def give_up_after(self, last: SaveId, why: str) -> None:
        """Wait for the parts of no checkpoint that is newer than this one: other nodes will not write them."""
        self._peers.give_up_after(last, why)

    def nodes_lost(self) -> None:
        """Wait no more, at the end of the job, for parts that nodes have taken with them."""
        self._peers.nodes_lost()

    @property
    def awaited(self) -> str:
        """Description of the persist that `drain` waits for; empty for none."""
        if self._jobs:
            return f"{self._jobs[0].id} is being persisted in {self.storage.path}"
        return f"other nodes have yet to persist their parts in {self.storage.path}" if self._peers.waiting else ""

    async def drain(self, seconds: float) -> bool:
        """Wait until nothing waits to be persisted; False if that takes longer than ``seconds``."""
        end = time.monotonic() + seconds
        if self._looking is not None:  # it may find that saves in memory must be persisted again
            await asyncio.wait([self._looking], timeout=seconds)
        self.owed.hurry()
        done = self._task is None or (await asyncio.wait([self._task], timeout=seconds))[0]
        looking = asyncio.create_task(self._see_newer())
        await self._peers.drain(end - time.monotonic())
        looking.cancel()
        return bool(done)

    async def _see_newer(self) -> None:
        """Look for checkpoints of other nodes that go on without this one: their parts of older saves do not come."""
        while not self.tenure.lost:
            await asyncio.sleep(LAST_LOOK)
            with suppress(FastckptError, OSError):
                newest, _ = await asyncio.to_thread(_look, self.storage)
                self.stats.durable = max((id for id in (newest, self.durable) if id is not None), default=None)

    def close(self, *, wait: bool) -> None:
        """End the thread; waiting persists are dropped, and with ``wait`` the present one is finished first."""
        if self._task is not None:
            self._task.cancel()
        self.owed.forget()
        self._peers.close()
        self.pool.shutdown(wait=wait, cancel_futures=True)
        if wait:
            self.storage.close()

    async def _run(self) -> None:
        while self._jobs:
            job = self._jobs[0]
            error = await self._persist(job)
            if isinstance(error, BadSource):
                self._give_up(job, error)
            elif isinstance(error, Superseded):
                self._end_for(error)
            elif error:
                await self._failed(job, error)
            else:
                self._finish(job)
                for slot in filter(None, (job.slot, self._newest_slot())):
                    for target in self.stats.targets(slot.id):  # it was asked for while storage was in trouble
                        self._submit(slot, target)
            self.owed.look()

    async def _persist(self, job: PersistJob) -> BaseException | None:
        """Persist a job's slot; returns the error, of any kind: no error may end this loop."""
        # 1. publish, or contribute this node's part, in a thread   2. with
        # a manifest it is durable; with a part, wait for the others
        start = time.perf_counter()
        hand_over = partial(job.hand_over, self.storage, self.tenure)
        work = asyncio.get_running_loop().run_in_executor(self.pool, hand_over)
        # asyncio.wait raises nothing of the thread's, so no error of a persist can end the loop over the jobs.
        await asyncio.wait([work])
        if error := work.exception():
            return error
        self.owed.paid(job.id)  # a retry has taken the newest
        if isinstance(result := work.result(), Manifest):
            await self._persisted(job, start, result)
        else:
            self._peers.wait_for(result, job.target, partial(self._persisted, job, start), asked=not job.flush)
        return None

    async def _persisted(self, job: PersistJob, start: float, manifest: Manifest) -> None:
        seconds = time.perf_counter() - start
        self.tenure.reported(job.id)
        self._done.append((job.id, job.target))
        self.stats.asked.discard((job.id, job.target))
        self.news.append(job.id)
        digests = {entry.name: entry.digest for entry in manifest.files}
        # The copy computed these digests on the way: a resume from memory can then compare without another reading.
        job.slot.attest(job.id, digests, start, of_first=self._first)
        self.trouble = ""
        self.stats.made_durable(job.id, size := manifest.size, seconds)
        metrics.event("flush_done" if job.flush else "persisted", step=job.id.step, bytes=size, seconds=seconds)
        logger.info("persisted %s: %s in %.2f s", job.id, decimal(size), seconds)
        await self._on_durable()

    def _complain(self, trouble: str, step: int, **more: Any) -> None:
        self.trouble = trouble
        metrics.counts["persist_failures"] += 1
        metrics.event("persist_failed", step=step, error=trouble, **more)
        self.stats.fail(trouble)
        logger.warning("%s", trouble)

    async def _failed(self, job: PersistJob, error: BaseException) -> None:
        job.attempts += 1
        attempt = job.attempts
        self._complain(f"{job.id} could not be persisted (attempt {attempt}): {error}", job.id.step, attempt=attempt)
        while self._jobs:
            # All jobs give their pins back: saves must find slots while storage is in trouble.
            self._finish(self._jobs[0])
        if job.attempts < ATTEMPTS:
            self._jobs.append(job)
            await asyncio.sleep(FIRST_PAUSE * 2 ** (job.attempts - 1))
            self._retarget(job)
        else:
            self.owed.forget()

    def _end_for(self, error: Superseded) -> None:
        """Publish nothing more: another job saves here now. Memory stays as it is."""
        self.trouble = str(error)
        self.stats.fail(self.trouble)
        self.owed.forget()
        while self._jobs:
            self._finish(self._jobs[0])

    def _give_up(self, job: PersistJob, error: BadSource) -> None:
        """Memory differs from the committed save: it must not become a checkpoint on storage, nor be resumed from."""
        self._finish(job)
        self.trouble = f"{job.id} in memory is bad, and given up: {error}"
        self.stats.fail(self.trouble)
        if job.slot.id == job.id:
            job.slot.give_up(str(error))
        newest = self._newest_slot()
        # An older slot may still be newer than storage.
        if job.flush and newest is not None:
            self.flush(newest)

    def _retarget(self, job: PersistJob) -> None:
        """Let a retry persist the newest checkpoint: until storage is well again, older ones cannot be had as well."""
        newest = self._newest_slot()
        if newest is None or newest.id is None:
            self._jobs.remove(job)
            return
        if job.id != newest.id:
            logger.warning("%s is not tried again: %s is persisted instead", job.id, newest.id)
            job.target = newest.target
            self.stats.overtaken += not job.lasting
        job.slot, job.id = newest, newest.id
        job.pin()

    def _finish(self, job: PersistJob) -> None:
        job.unpin()
        self._jobs.remove(job)


def _look(storage: Store) -> tuple[SaveId | None, int]:
    """The newest durable id, and the newest history that was opened, or of which nodes have written a part."""
    scan = storage.scan()
    durable = max((stored.id for stored in scan.whole), default=None)
    return durable, max([id.history for id in scan.gathered] + [storage.histories.newest()])
