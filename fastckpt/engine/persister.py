"""Persists slots in the background: one at a time, again after a failure, then retires old checkpoints."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastckpt import metrics
from fastckpt.engine.deletion import obsolete
from fastckpt.engine.slot import Slot
from fastckpt.engine.tally import Tally
from fastckpt.errors import FastckptError, PersistError
from fastckpt.format.ids import SaveId
from fastckpt.format.manifest import MODEL, Manifest
from fastckpt.memory import slots
from fastckpt.policy.retention import KeepAll, Policy
from fastckpt.storage.copier import Copier
from fastckpt.storage.source import BadSource, Source
from fastckpt.storage.store import Store, open_store

logger = logging.getLogger("fastckpt")

ATTEMPTS = 6
PIN = "persist"
"""How the pins of this part begin."""
REMEMBERED = 64
"""How many persists are remembered, for ranks that ask for the same one later."""
FIRST_PAUSE = 0.5
"""Seconds before the first retry; each further one waits twice as long."""


@dataclass(eq=False)
class _Job:
    slot: Slot
    id: SaveId
    target: str
    flush: bool
    attempts: int = 0

    @property
    def pin(self) -> str:
        """The name of this job's pin on its slot."""
        return f"{PIN} {self.target}"


class Persister:
    """The way from memory to the storage of one checkpoint directory.

    A slot is pinned from `submit` until it is durable, so that every checkpoint that was asked for becomes durable;
    what cannot have a slot meanwhile is skipped, and its caller told so. While storage is in trouble nothing is
    pinned, so that memory stays new, and only the newest checkpoint is tried again.

    Attributes:
        after: Called when a checkpoint has become durable.
        in_use: A durable checkpoint that must not be retired now.
    """

    def __init__(self, location: str, group_rank: int, newest_slot: Callable[[], Slot | None], copier: Copier) -> None:
        self._whole = group_rank == 0
        # The first node persists the model. The others persist what is theirs alone, each for itself.
        self.storage = open_store(location if self._whole else f"{location}/.fastckpt/node-{group_rank}", copier)
        self.policy: Policy = KeepAll()
        self.tally = Tally(location)
        self.news: list[SaveId] = []
        self.trouble = ""
        self.after: Callable[[], None] = lambda: None
        self.in_use: Callable[[], SaveId | None] = lambda: None
        self._newest_slot = newest_slot
        self._jobs: list[_Job] = []
        self._done: deque[tuple[SaveId, str]] = deque(maxlen=REMEMBERED)
        self._task: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._pool = ThreadPoolExecutor(1, "fastckpt-persist")

    async def open(self) -> SaveId | None:
        """Clear away what dead persists left; returns the newest durable id, if there is one."""

        def look() -> SaveId | None:
            try:
                self.storage.sweep()
            except PersistError as error:
                logger.warning("%s", error)  # say, a read-only file system: it can be read all the same
            return max((stored.id for stored in self.storage.checkpoints()), default=None)

        self.tally.durable = await asyncio.get_running_loop().run_in_executor(self._pool, look)
        return self.durable

    def look_again(self, then: Callable[[], None]) -> None:
        """Find out anew what is durable, since some of it was found bad; then call ``then``."""
        self._looking = asyncio.create_task(self._look_again(then))

    async def _look_again(self, then: Callable[[], None]) -> None:
        look = asyncio.get_running_loop().run_in_executor(self._pool, self.storage.checkpoints)
        await asyncio.wait([look])
        if error := look.exception():
            logger.warning("what is durable could not be looked up: %s", error)
            return
        durable = {stored.id for stored in look.result()}
        self.tally.durable = max(durable, default=None)
        self._done = deque([entry for entry in self._done if entry[0] in durable], maxlen=REMEMBERED)
        then()

    @property
    def durable(self) -> SaveId | None:
        """The newest checkpoint that is durable."""
        return self.tally.durable

    @property
    def waiting(self) -> int:
        """How many persists wait or run."""
        return len(self._jobs)

    def submit(self, slot: Slot, target: str = "") -> None:
        """Persist the checkpoint in ``slot`` with its model at ``target``, unless it is or will be there already.

        An empty target is what the first rank gave when it saved, or the default.
        """
        if slot.id is not None:
            self.tally.want(slot.id)
            self._submit(slot, target, flush=False)

    def flush(self, slot: Slot) -> None:
        """Persist the checkpoint in ``slot`` if it is newer than all that is durable or on its way."""
        if slot.id is None:
            return
        self.tally.want(slot.id)
        newest = max([job.id for job in self._jobs] + ([self.durable] if self.durable else []), default=None)
        if newest is None or slot.id > newest:
            metrics.event("flush_started", step=slot.id.step)
            self._submit(slot, "", flush=True)

    def _submit(self, slot: Slot, target: str, *, flush: bool) -> None:
        assert slot.id is not None
        job = _Job(slot, slot.id, target or slots.read(slot.path).details.get("path", ""), flush)
        if (job.id, job.target) in self._done or any((j.id, j.target) == (job.id, job.target) for j in self._jobs):
            return
        if self._jobs and self._jobs[0].attempts:
            self._jobs[0].attempts = 1  # a retry takes the newest checkpoint anyway: let it try anew
            self._jobs[0].flush |= flush
            return
        self._pin(job)
        self._jobs.append(job)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def drain(self, seconds: float) -> bool:
        """Wait until nothing waits to be persisted; False if that takes longer than ``seconds``."""
        if self._task is None:
            return True
        done, _ = await asyncio.wait([self._task], timeout=seconds)
        return bool(done)

    def close(self, *, wait: bool) -> None:
        """End the thread; what still waits is dropped, and with ``wait`` what it writes now is written first."""
        if self._task is not None:
            self._task.cancel()
        self._pool.shutdown(wait=wait, cancel_futures=True)
        if wait:
            self.storage.close()

    async def _run(self) -> None:
        while self._jobs:
            job = self._jobs[0]
            error = await self._persist(job)
            if isinstance(error, BadSource):
                self._give_up(job, error)
            elif error:
                await self._failed(job, error)
            else:
                self._finish(job)
                await self._retire()

    async def _persist(self, job: _Job) -> BaseException | None:
        """Persist a job's slot; returns what went wrong, whatever it is: no error may end this loop."""
        start = time.perf_counter()
        publish = partial(_publish, self.storage, job, model=self._whole)
        work = asyncio.get_running_loop().run_in_executor(self._pool, publish)
        await asyncio.wait([work])
        if work.exception() is None:
            self._persisted(job, work.result(), time.perf_counter() - start)
        return work.exception()

    def _persisted(self, job: _Job, manifest: Manifest, seconds: float) -> None:
        self._done.append((job.id, job.target))
        self.news.append(job.id)
        ours = {entry.name: entry.digest for entry in manifest.files if self._whole or entry.name != MODEL}
        job.slot.attest(job.id, ours, time.perf_counter() - seconds)
        self.trouble = ""
        self.after()
        size = manifest.size
        self.tally.made_durable(job.id, size, seconds)
        metrics.event("flush_done" if job.flush else "persisted", step=job.id.step, bytes=size, seconds=seconds)
        logger.info("persisted %s: %.2f GB in %.2f s", job.id, size / 1e9, seconds)

    async def _failed(self, job: _Job, error: BaseException) -> None:
        job.attempts += 1
        metrics.counts["persist_failures"] += 1
        self.trouble = f"{job.id} could not be persisted (attempt {job.attempts}): {error}"
        self.tally.fail(self.trouble)
        metrics.event("persist_failed", step=job.id.step, attempt=job.attempts, error=str(error))
        logger.warning("%s", self.trouble)
        while self._jobs:
            self._finish(self._jobs[0])
        if job.attempts < ATTEMPTS:
            self._jobs.append(job)
            await asyncio.sleep(FIRST_PAUSE * 2 ** (job.attempts - 1))
            self._retarget(job)

    def _give_up(self, job: _Job, error: BadSource) -> None:
        """Memory is not what was committed there: it must not become a checkpoint on storage, nor be resumed from."""
        self._finish(job)
        metrics.counts["bad_checkpoints"] += 1
        metrics.event("bad_checkpoint", history=job.id.history, step=job.id.step, tier="memory", reason=str(error))
        self.trouble = f"{job.id} in memory is bad, and given up: {error}"
        self.tally.fail(self.trouble)
        logger.warning("%s", self.trouble)
        if job.slot.id == job.id:
            job.slot.clear()
        newest = self._newest_slot()
        if job.flush and newest is not None:
            self.flush(newest)

    def _retarget(self, job: _Job) -> None:
        """Let a retry persist the newest checkpoint: until storage is well again, older ones cannot be had as well."""
        newest = self._newest_slot()
        if newest is None or newest.id is None:
            self._jobs.remove(job)
            return
        if job.id != newest.id:
            logger.warning("%s is given up for %s", job.id, newest.id)
            job.target = slots.read(newest.path).details.get("path", "")
        job.slot, job.id = newest, newest.id
        self._pin(job)

    def _finish(self, job: _Job) -> None:
        self._unpin(job)
        self._jobs.remove(job)

    def _pin(self, job: _Job) -> None:
        job.slot.pins[job.pin] = f"step {job.id.step} is being persisted"

    def _unpin(self, job: _Job) -> None:
        job.slot.pins.pop(job.pin, None)

    async def _retire(self) -> None:
        def retire() -> None:
            for old in sorted({*obsolete(self.policy, self.storage.checkpoints())} - {self.in_use()}):
                self.storage.delete(old)

        if self.policy == KeepAll():
            return
        try:
            await asyncio.get_running_loop().run_in_executor(self._pool, retire)
        except (FastckptError, OSError) as error:
            logger.warning("old checkpoints could not be deleted: %s", error)


def _publish(storage: Store, job: _Job, *, model: bool) -> Manifest:
    """Publish what is in a job's slot, if it is still what was committed there; with the model or without."""
    records = slots.read(job.slot.path)
    if records.committed != job.id:
        raise BadSource(f"{job.slot.path} does not hold {job.id} any more")
    sources = {
        name: Source(job.slot.path / name, size, records.digests.get(name, ""))
        for name, size in records.files.items()
        if model or name != MODEL
    }
    details: dict[str, Any] = dict(records.details)
    details.pop("path", None)
    parent = details.pop("parent", None)
    return storage.publish(
        job.id,
        sources,
        target=job.target if model else "",
        parent=SaveId(*parent) if parent else None,
        world_size=details.pop("world_size", 1),
        details=details,
    )
