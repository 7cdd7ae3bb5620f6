"""The durable levels of a checkpoint directory: the directory itself, and perhaps a remote store behind it."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable

from fastckpt.engine.persister import Persister
from fastckpt.engine.slot import Slot
from fastckpt.engine.upload import Upload
from fastckpt.format.ids import SaveId
from fastckpt.ipc.messages import Hello
from fastckpt.policy.retention import from_json
from fastckpt.policy.verify import level
from fastckpt.storage.copier import Copier

logger = logging.getLogger("fastckpt")

FIRST_WORDS = (4.0, 26.0)
"""Seconds of the end of a job after which it says what it waits for, and from then until it says so again."""
FURTHER_WORDS = 60.0


class Levels:
    """Memory is persisted to the first level; what is durable there is uploaded to the second."""

    def __init__(self, hello: Hello, newest_slot: Callable[[], Slot | None], copier: Copier) -> None:
        alone = hello.local_world_size == hello.world_size
        self.persister = Persister(hello.directory, hello.group_rank, newest_slot, copier, alone=alone)
        remote = hello.remote if hello.group_rank == 0 else ""  # the nodes of a job share the first level
        self.upload = Upload(self.persister.storage, remote, copier)
        self.persister.tally.remote = self.upload.copies if remote else None
        self.persister.after = self.upload.look
        self.persister.in_use = lambda: self.upload.busy

    async def open(self, in_memory: SaveId | None) -> int:
        """Find out what is durable; the newest history there may be. Raises PersistError if that is unknown."""
        durable = await self.persister.open()
        known = max((save for save in (in_memory, durable) if save is not None), default=None)
        histories = [self.persister.newest_history, known.history if known else 0]
        return max(await self.upload.open(known), *histories)

    def join(self, hello: Hello) -> None:
        """Heed what a writer wishes."""
        if hello.local_rank == 0 and hello.policy:
            self.persister.policy = from_json(hello.policy)
        if hello.local_rank == 0 and hello.remote_policy:
            self.upload.policy = from_json(hello.remote_policy)
        if level(hello.verify) == "always":
            self.persister.storage.read_back = True
            self.upload.read_back()

    @property
    def trouble(self) -> str:
        """Why persists or uploads fail at the moment; empty while they do not."""
        return self.persister.trouble or self.upload.trouble

    @property
    def newest(self) -> SaveId | None:
        """The newest durable checkpoint of all levels; None if there is none."""
        return max((save for save in (self.persister.durable, self.upload.copies.newest) if save), default=None)

    def look_again(self, then: Callable[[], None]) -> None:
        """Find out anew what is durable, since some of it was found bad; then call ``then``."""
        self.persister.look_again(then)
        self.upload.forget()

    async def finish(self, seconds: float) -> bool:
        """Wait until all persists and uploads have come to an end; False if that takes longer."""
        end = time.monotonic() + seconds
        telling = asyncio.create_task(self._tell_what_is_awaited(end))
        try:
            drained = await self.persister.drain(seconds)
            return await self.upload.finish(max(0.0, end - time.monotonic())) and drained
        finally:
            telling.cancel()

    async def _tell_what_is_awaited(self, end: float) -> None:
        for pause in itertools.chain(FIRST_WORDS, itertools.repeat(FURTHER_WORDS)):
            await asyncio.sleep(pause)
            left = max(0.0, end - time.monotonic())
            what = self.persister.awaited or self.upload.awaited
            logger.warning("the end of the job waits: %s. %.0f s are left (--fast-flush-timeout)", what, left)

    def close(self, *, wait: bool) -> None:
        """End the threads; with ``wait``, after what they do now."""
        self.upload.close(wait=wait)
        self.persister.close(wait=wait)
