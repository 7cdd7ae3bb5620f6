"""Waits until the other nodes have written their parts of a checkpoint, and sees that it is published."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastckpt._core import metrics
from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import Manifest
from fastckpt._core.storage.store import Pending
from fastckpt.errors import Superseded

logger = logging.getLogger("fastckpt")

DEADLINE = 600.0
"""Seconds after which a checkpoint is not waited for any more: the last of its nodes may publish it still."""
LAST_DEADLINE = 60.0
"""The same at the end of a job: this node's part is on storage by then."""
PAUSE = 0.1
"""Seconds between two looks at first; each further pause is longer by half."""
LONGEST_PAUSE = 2.0

Key = tuple[SaveId, str]


class NodeParts:
    """This node's parts on storage, of checkpoints that do not count yet because they lack other nodes' parts.

    No slot is pinned for them. A checkpoint that a newer one has overtaken is given up in silence: some node may have
    skipped its save.

    Args:
        overtaken: Returns whether a newer checkpoint is durable.
        complain: Called with the fault, and the step.
    """

    def __init__(self, overtaken: Callable[[SaveId], bool], complain: Callable[[str, int], None]) -> None:
        self._overtaken = overtaken
        self._complain = complain
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._asked: set[Key] = set()
        self._last: tuple[SaveId, str] | None = None
        self._lost: set[Key] = set()
        # A thread of its own: looking for parts on slow storage must not delay this node's next persist.
        self._pool = ThreadPoolExecutor(1, "fastckpt-peers")

    def wait_for(
        self, pending: Pending, target: str, then: Callable[[Manifest], Awaitable[None]], *, asked: bool
    ) -> None:
        """Wait in the background, then call ``then``; ``asked`` if somebody asked for this checkpoint, and may wait."""
        key = (pending.id, target)
        self._tasks[key] = asyncio.create_task(self._wait(key, pending, then))
        if asked:
            self._asked.add(key)

    def give_up_after(self, last: SaveId, why: str) -> None:
        """Wait for no checkpoint that is newer than this one: the other nodes have none."""
        self._last = last, why

    def nodes_lost(self) -> None:
        """Nodes are gone, with their parts of awaited checkpoints: the end of the job does not wait for them."""
        self._lost |= self._tasks.keys()

    @property
    def all(self) -> Iterable[Key]:
        """The ids and targets of checkpoints of which this node has written its part and waits for others'."""
        return self._tasks.keys()

    @property
    def waiting(self) -> int:
        """Number of checkpoints for which somebody may wait."""
        return len(self._asked)

    async def drain(self, seconds: float) -> None:
        """Wait for the other nodes, for the last time; parts that they have not written by then are reported."""
        waiting = {key: task for key, task in self._tasks.items() if key not in self._lost}
        current = {id: task for (id, _), task in waiting.items() if not self._is_in_vain(id)}
        if current:
            await asyncio.wait(current.values(), timeout=min(seconds, LAST_DEADLINE))
        for id in [id for id, task in current.items() if not task.done() and not self._is_in_vain(id)]:
            self._complain(f"{id} lacks the parts of other nodes, which may still come", id.step)
        for task in self._tasks.values():
            task.cancel()

    def close(self) -> None:
        """Wait no more."""
        for task in self._tasks.values():
            task.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _wait(self, key: Key, pending: Pending, then: Callable[[Manifest], Awaitable[None]]) -> None:
        end, pause, trouble = time.monotonic() + DEADLINE, PAUSE, ""
        try:
            while not self._is_in_vain(pending.id):
                await asyncio.sleep(pause)
                pause = min(1.5 * pause, LONGEST_PAUSE)
                # Each look also publishes if all parts are there:
                # whichever node looks next does it, also if others died.
                manifest, trouble = await self._try(pending.complete, trouble)
                if manifest is not None:
                    await then(manifest)
                    return
                if time.monotonic() > end:
                    missing, why = await self._try(pending.missing, trouble)
                    text = f"{pending.id} lacks the parts of nodes {missing} after {DEADLINE:.0f} s. {why}"
                    self._complain(text, pending.id.step)
                    return
            if self._last is not None and self._is_later(pending.id):
                self._complain(f"{pending.id} will not be whole: {self._last[1]}", pending.id.step)
                return
            metrics.event("persist_overtaken", step=pending.id.step)
            logger.info(
                "%s is not persisted: a newer save is persisted instead, and parts of other nodes are missing",
                pending.id,
            )
        except Superseded as error:
            logger.warning("stopped waiting for the parts of %s of other nodes: %s", pending.id, error)
        finally:
            del self._tasks[key]
            self._asked.discard(key)
            self._lost.discard(key)

    def _is_in_vain(self, id: SaveId) -> bool:
        return self._overtaken(id) or self._is_later(id)

    def _is_later(self, id: SaveId) -> bool:
        """Return whether other nodes ended before they saved this; another history is one of other workers."""
        return self._last is not None and id > (last := self._last[0]) and id.history == last.history

    async def _try(self, work: Callable[[], Any], before: str) -> tuple[Any, str]:
        """The result, or None and why; the reason is logged once."""
        result = asyncio.get_running_loop().run_in_executor(self._pool, work)
        await asyncio.wait([result])
        error = result.exception()
        if error is None:
            return result.result(), ""
        if isinstance(error, Superseded):
            raise error
        if str(error) != before:
            logger.warning("%s", error)
        return None, str(error)
