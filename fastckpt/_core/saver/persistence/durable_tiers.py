"""The durable tiers of a checkpoint directory: the directory itself, and perhaps a remote store."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Collection
from functools import partial

from fastckpt._core.error_codes import coded
from fastckpt._core.format.ids import SaveId
from fastckpt._core.io.copier import Copier
from fastckpt._core.ipc.messages import Hello
from fastckpt._core.policy.retention import KeepAll, Policy, from_json
from fastckpt._core.policy.verify import verify_mode
from fastckpt._core.retention import retire
from fastckpt._core.saver.persistence.opening import Opening
from fastckpt._core.saver.persistence.persister import Persister
from fastckpt._core.saver.persistence.predecessor import Job
from fastckpt._core.saver.persistence.tenure import Tenure
from fastckpt._core.saver.persistence.uploader import Uploader
from fastckpt._core.saver.slot import Slot
from fastckpt._core.saver.stats import SaverStats
from fastckpt._core.storage.history import Record
from fastckpt._core.storage.store import Store, open_store
from fastckpt.errors import FastckptError, PersistError

logger = logging.getLogger("fastckpt")

NOTICES = (4.0, 26.0)
"""Seconds of the end of a job until it logs the awaited transfer, and from then until it logs that again."""
NOTICE_INTERVAL = 60.0


class DurableTiers:
    """Memory is persisted to the first tier; checkpoints that are durable there are uploaded to the second."""

    def __init__(self, hello: Hello, newest_slot: Callable[[], Slot | None], copier: Copier, job: Job) -> None:
        self._job, self._copier, self._first = job, copier, _is_first(hello)
        storage = open_store(hello.directory, copier)
        self.persister = Persister(
            storage,
            Tenure(storage, job, enabled=self._first),
            newest_slot,
            SaverStats(hello.directory),
            first=self._first,
            alone=_is_alone(hello),
            on_durable=self._became_durable,
        )
        self.upload = self._uploader(hello)
        self._policy: Policy = KeepAll()
        self._claimed = 0
        self._is_back = False
        self._claiming: asyncio.Task[None] | None = None

    def _uploader(self, hello: Hello) -> Uploader:
        """The way to the remote store, which the first node has alone: all nodes share the first tier."""
        storage = self.persister.storage
        remote = open_store(hello.remote, self._copier) if hello.remote and self._first else None
        upload = Uploader(storage, remote, hello.remote, Tenure(remote, self._job) if remote else None)
        self.persister.stats.remote = upload.copies if remote else None
        return upload

    @property
    def _tenures(self) -> list[Tenure]:
        return [tenure for tenure in (self.persister.tenure, self.upload.tenure) if tenure]

    def begin_round(self, launches: Collection[str], first: str) -> None:
        """Take part in a round of these agents, after one that may have lost its places; blocks."""
        self._is_back = self._is_back or any(tenure.lost_to for tenure in self._tenures)
        for tenure in self._tenures if self._is_back else ():
            tenure.step_down()  # a round that has lost one place gives up the others: else both halves would wait
        for tenure in self._tenures:
            tenure.begin_round(launches, first)

    @property
    def lost_to(self) -> Record | None:
        """The record of the job that has taken a place from this one; None if none has."""
        return next((tenure.lost_to for tenure in self._tenures if tenure.lost_to), None)

    @property
    def awaited(self) -> Record | None:
        """The record of the job that `open` waits for; None if it does not wait."""
        return next((record for tenure in self._tenures if (record := tenure.awaited)), None)

    def may_return(self) -> bool:
        """Return whether that job has left all places; blocks. Raises PersistError if a place does not answer."""
        return all(tenure.may_return() for tenure in self._tenures)

    @property
    def ended_elsewhere(self) -> bool:
        """True if that job has ended well, as `may_return` has seen."""
        lost = [tenure for tenure in self._tenures if tenure.lost_to]
        return bool(lost) and all(tenure.ended_elsewhere for tenure in lost)

    async def assume(self, hello: Hello) -> int:
        """Take this node's part in a new round, in which another may be the first; returns the newest history.

        A persist under way goes on. Raises as `open`.
        """
        was_lost, self._is_back = self._is_back, False
        first = _is_first(hello)
        self.persister.assume(first=first, alone=_is_alone(hello))
        if first is self._first and not was_lost:
            return self.persister.newest_history
        # 1. the right to publish   2. checkpoints that the former first node made durable   3. the remote store
        tenure = self.persister.tenure
        await asyncio.to_thread(tenure.enable if first else tenure.disable)
        durable = await self.persister.open()
        former, self._first = self.upload, first
        self.upload = self._uploader(hello)
        if former.tenure is not None:
            await asyncio.to_thread(former.tenure.close)
        former.close(wait=False)
        if self.upload.tenure is not None:
            await self._enter(self.upload.tenure)
        return max(self.persister.newest_history, await self.upload.open(durable))

    async def _became_durable(self) -> None:
        """Upload the first tier's newest checkpoint, and delete those that its policy does not keep."""
        self.upload.look()
        if not self._first or self._policy == KeepAll():
            return
        # In the persist's thread: a deletion and a publication in one directory never run at the same time.
        work = partial(retire, self.persister.storage, self._policy, lambda: self.upload.busy)
        try:
            await asyncio.get_running_loop().run_in_executor(self.persister.pool, work)
        except (FastckptError, OSError) as error:
            logger.warning("old checkpoints could not be deleted: %s", error)

    async def open(self, in_memory: SaveId | None) -> int:
        """Find the durable checkpoints; the newest history there may be. Raises PersistError if that is unknown.

        Waits until other jobs have left these places; raises PlaceInUse if they do not.
        """
        # Rights first, then the look: checkpoints that a predecessor publishes until it ends must be seen.
        histories = [await self._enter(tenure) for tenure in self._tenures]
        durable = await self.persister.open()
        known = max((save for save in (in_memory, durable) if save is not None), default=None)
        histories += [self.persister.newest_history, known.history if known else 0, await self.upload.open(known)]
        return max(histories)

    async def _enter(self, tenure: Tenure) -> int:
        try:
            return await asyncio.to_thread(tenure.enter)
        except PersistError:
            if tenure is self.persister.tenure:
                raise
            return 0  # it counts as one that may hold many: see `Uploader.open`

    def claim(self, slot: Slot) -> None:
        """Open the history of a slot's whole save in all tiers, in the background, unless that was done."""
        if slot.id is None or slot.id.history <= self._claimed or (self._claiming and not self._claiming.done()):
            return
        self._claiming = asyncio.create_task(self._claim(slot, slot.id.history))

    async def _claim(self, slot: Slot, history: int) -> None:
        """Claim all places in one order, so that of two jobs one gets all; the next save repeats a failed claim."""
        loop = asyncio.get_running_loop()
        try:
            opening = await loop.run_in_executor(None, Opening.of_slot, slot.path)
            if opening is None or opening.id.history != history:
                return
            # The directory first, in every job: two jobs that took the tiers in different orders could each get one.
            await loop.run_in_executor(self.persister.pool, self.persister.tenure.hold, opening)
            if self.upload.tenure:
                await loop.run_in_executor(self.upload.pool, self.upload.tenure.hold, opening)
        except (FastckptError, OSError) as error:
            # At debug: a persist calls `hold` again, and reports its error.
            logger.debug("history %d is not opened yet: %s", history, error)
        else:
            self._claimed = history

    @property
    def lost(self) -> str:
        """Reason why this job may save no more: another job has taken its place. Empty while it may."""
        return next((tenure.lost for tenure in self._tenures if tenure.lost), "")

    def start_over(self) -> SaveId | None:
        """The checkpoint that workers have to be restarted for, to resume it; None for none."""
        found = max((save for tenure in self._tenures if (save := tenure.start_over())), default=None)
        if found is not None:
            self.persister.stats.durable = max(found, self.persister.durable or found)
            self.upload.copies.newest = max(found, self.upload.copies.newest or found)
        return found

    @property
    def may_start_over(self) -> bool:
        """True if `start_over` regains the places that are lost."""
        return all(tenure.found for tenure in self._tenures if tenure.lost)

    async def gone(self) -> list[str]:
        """Describe the newest checkpoint of each tier, made durable or found by this job, that is gone."""
        newest = [(self.persister.storage, self.persister.durable), (self.upload.remote, self.upload.copies.newest)]
        looks = [asyncio.to_thread(_gone, store, save) for store, save in newest if store and save]
        return [text for text in await asyncio.gather(*looks) if text]

    def join(self, hello: Hello) -> None:
        """Apply the options of a writer."""
        # All ranks run the same script: one of them is enough, and cannot contradict the others.
        if hello.local_rank == 0 and hello.policy:
            self._policy = from_json(hello.policy)
        if hello.local_rank == 0 and hello.remote_policy:
            self.upload.policy = from_json(hello.remote_policy)
        if verify_mode(hello.verify) == "always":
            self.persister.storage.read_back = True
            self.upload.read_back()

    @property
    def trouble(self) -> str:
        """Reason why persists or uploads fail at the moment; empty while they do not."""
        return self.lost or self.persister.trouble or self.upload.trouble

    @property
    def newest(self) -> SaveId | None:
        """The newest durable checkpoint of all tiers; None if there is none."""
        return max((save for save in (self.persister.durable, self.upload.copies.newest) if save), default=None)

    def look_again(self, then: Callable[[], None]) -> None:
        """Look again for durable checkpoints, since some were found bad; then call ``then``."""
        self.persister.look_again(then)
        self.upload.forget()

    async def finish(self, seconds: float) -> bool:
        """Wait until all persists and uploads have come to an end; False if that takes longer."""
        end = time.monotonic() + seconds
        telling = asyncio.create_task(self._tell_what_is_awaited(end))
        try:
            # Uploads after persists: checkpoints that become durable in this wait are uploaded, too.
            drained = await self.persister.drain(seconds)
            return await self.upload.finish(max(0.0, end - time.monotonic())) and drained
        finally:
            telling.cancel()

    async def _tell_what_is_awaited(self, end: float) -> None:
        for pause in itertools.chain(NOTICES, itertools.repeat(NOTICE_INTERVAL)):
            await asyncio.sleep(pause)
            left = max(0.0, end - time.monotonic())
            what = self.persister.awaited or self.upload.awaited or "a persist comes to its end"
            text = coded("the end of the job waits: %s. %.0f s are left (--fast-flush-timeout)", "FC-023")
            logger.warning(text, what, left)

    def close(self, *, wait: bool) -> None:
        """End the threads; with ``wait``, after their present work. Others may save here from now on."""
        if self._claiming is not None:
            self._claiming.cancel()
        self.stop()
        self.upload.close(wait=wait)
        self.persister.close(wait=wait)

    def stop(self) -> None:
        """Wait for other jobs no more."""
        for tenure in self._tenures:
            tenure.stop()

    async def leave(self, *, finished: bool) -> None:
        """Record in each tier that this job has ended, so that others need not wait for it, nor end it once more."""
        ends = (asyncio.to_thread(tenure.close, finished=finished) for tenure in self._tenures)
        await asyncio.gather(*ends)


def _is_first(hello: Hello) -> bool:
    return hello.group_rank == 0


def _is_alone(hello: Hello) -> bool:
    return hello.local_world_size == hello.world_size


def _gone(store: Store, save: SaveId) -> str:
    try:
        ids = {stored.id for stored in store.checkpoints()}
    except FastckptError:
        return ""  # that is another error, which is reported
    return "" if save in ids else f"{save}, the newest that was durable in {store.path}, is not there any more"
