"""Marks the checkpoint directory, so that a later launch knows the owner of the memory that it finds."""

import asyncio
import contextlib
import logging
import socket

from fastckpt._core.error_codes import coded
from fastckpt._core.format.ids import SaveId
from fastckpt._core.memory import slots
from fastckpt._core.memory.arena import Arena
from fastckpt._core.storage.store import Store, is_url
from fastckpt.errors import FastckptError, WrongDirectory

logger = logging.getLogger("fastckpt")

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0
"""Seconds until a directory that could not be marked is tried again: twice as long each time."""
LAST = 5.0
"""Seconds that the end of a job waits for an attempt that is under way."""


class DirectoryMark:
    """The claim of an arena on its checkpoint directory: written there as soon as that works, and never twice."""

    def __init__(self, arena: Arena, storage: Store, location: str, *, first: bool) -> None:
        self._arena = arena
        self._storage = storage
        self._location = location
        self.assume(first=first)
        self._task: asyncio.Task[None] | None = None
        self._work: asyncio.Future[str] | None = None

    def assume(self, *, first: bool) -> None:
        """Know whether this is the first node: at a URL the last writer would win, so it alone writes there."""
        self._writes = first or not is_url(self._location)

    async def settle(self, *, alone: bool, of_others: str = "") -> None:
        """Keep the saves in memory if they are of this directory, and nobody else may write to it; else give them up.

        Args:
            alone: True if nobody else writes to that memory.
            of_others: The mark that other nodes of the job know; empty if they know none yet.

        Raises:
            WrongDirectory: They have another directory of this name. Memory stays as it is, and nothing is written.
            PersistError: The directory's mark cannot be read, or a store cannot be written to.
        """
        identity = await asyncio.get_running_loop().run_in_executor(None, self._storage.identity)
        if of_others and identity.mark != of_others:
            raise WrongDirectory(
                coded(
                    f"{self._location} on {socket.gethostname()} is not the directory in which the other nodes of this "
                    f"job save: it has {'another' if identity.mark else 'no'} mark. This host takes no part in the "
                    "job. Mount the file system of the others there, and start its agent again",
                    "FC-049",
                )
            )
        if not alone:
            await self._give_up("processes of an earlier job still write to it")
        # A directory that was emptied or made again has no mark, or another: its name alone proves nothing.
        elif not self._arena.claim.is_of(*identity):
            await self._give_up("it is of another directory that had this name, or that was emptied since")
        self._arena.claim_for(*identity)
        await self._mark()
        if self._arena.claim.due:
            self._task = asyncio.create_task(self._keep_trying())

    async def _give_up(self, why: str) -> None:
        held = [id for slot in self._arena.slots if (id := slots.read(slot).committed)]
        await asyncio.to_thread(self._arena.renew)
        if held:
            newest: SaveId = max(held)
            logger.warning("discarding %s of %s in %s: %s", newest, self._location, self._arena.path, why)

    async def _mark(self) -> None:
        # In a thread: a request that storage never answers must not stop the event loop.
        self._work = asyncio.get_running_loop().run_in_executor(None, self._seen)
        await asyncio.wait([self._work])
        if mark := self._work.result():
            self._arena.saw(mark)

    def _seen(self) -> str:
        """The mark of the directory, which gets one if it is due; from then on only that directory is written to."""
        claim, mark = self._arena.claim, self._arena.claim.seen
        if claim.due:
            # Other nodes only look for the mark of the first: of two writers to a store the last would win.
            mark = self._storage.mark(claim.wanted) if self._writes else self._storage.identity().mark
        self._storage.know(mark)
        return mark

    async def _keep_trying(self) -> None:
        logger.info("%s has no mark yet; the memory in %s belongs to it", self._location, self._arena.path)
        pause = FIRST_PAUSE
        while self._arena.claim.due:
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            # Reported when the directory could not be marked first; persists report the same trouble.
            with contextlib.suppress(FastckptError, OSError):
                await self._mark()

    def close(self) -> None:
        """Try no more."""
        if self._task is not None:
            self._task.cancel()

    async def finish(self) -> bool:
        """Try no more; False if storage does not let go of the last attempt."""
        self.close()
        return self._work is None or bool((await asyncio.wait([self._work], timeout=LAST))[0])
