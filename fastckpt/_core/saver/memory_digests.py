"""Digests the newest checkpoint in memory in the background, so that bytes that change later are found.

When the workers have died it does so again, and compares: they need not, while all wait for them to train on.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fastckpt._core import metrics
from fastckpt._core.format.ids import SaveId
from fastckpt._core.io.direct import digest_file
from fastckpt._core.memory import slots
from fastckpt._core.saver.persistence.persist_job import PIN
from fastckpt._core.saver.slot import Slot

logger = logging.getLogger("fastckpt")

SETTLED = 1.0
"""Seconds that a checkpoint must have been the newest before it is digested: one that lasts less is not worth it."""


class DigestStopped(Exception):
    """A save has begun, or the job ends."""


class MemoryDigests:
    """Writes digests beside slots. All methods run in the saver's event loop; the work is a thread's.

    Nobody waits for it, and it pins nothing: it stops when a save begins.

    Attributes:
        enabled: True if anybody compares digests.
    """

    def __init__(self, newest: Callable[[], Slot | None]) -> None:
        self.enabled = True
        self._newest = newest
        self._closed = False
        self._saves = 0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._pool = ThreadPoolExecutor(1, "fastckpt-digest-memory")

    def look(self) -> None:
        """The newest checkpoint may be another: digest it if it is that still in a while."""
        if self._timer is not None:
            self._timer.cancel()
        # Each save starts the second again: where saves are that frequent, no checkpoint is worth digesting.
        self._timer = asyncio.get_running_loop().call_later(SETTLED, self._start)

    def make_way(self) -> None:
        """A save begins, which needs the processors more: stop, and look again when there is none."""
        self._saves += 1
        self.look()

    def _start(self) -> None:
        slot = self._newest()
        if not self.enabled or slot is None or slot.id is None:
            return
        if any(pin.startswith(PIN) for pin in slot.pins) or (self._task is not None and not self._task.done()):
            self.look()  # a persist reports the digests itself, if it succeeds
            return
        self._task = asyncio.create_task(self._digest(slot, slot.id))

    async def _digest(self, slot: Slot, save: SaveId) -> None:
        try:
            await self._compare(slot, save)
        except OSError as error:
            logger.warning("the digests of %s in memory could not be computed: %s", save, error)

    async def _compare(self, slot: Slot, save: SaveId) -> None:
        records = slots.read(slot.path)
        if slot.verified or records.committed != save or slots.damage(slot.path, records.files):
            return
        since, saves = time.perf_counter(), self._saves
        # Looked at after every block: a save that begins waits for one block of the digest at most.
        pace = _Pace(lambda: self._closed or self._saves != saves or slot.id != save)
        work = asyncio.get_running_loop().run_in_executor(self._pool, _digests, slot.path, save, records.files, pace)
        # asyncio.wait leaves the thread's exception in the future,
        # whatever it is, so no error ends the event loop's task.
        await asyncio.wait([work])
        error = work.exception()
        if error is None:
            _judge(slot, save, work.result(), since)
        elif not isinstance(error, DigestStopped):
            logger.warning("the digests of %s in memory could not be computed: %s", save, error)

    def close(self) -> None:
        """Stop at once."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _judge(slot: Slot, save: SaveId, found: dict[str, str], since: float) -> None:
    """Keep the digests of a checkpoint that had none; one that differs from its earlier digests is bad."""
    # Read after the bytes: a persist may have written digests meanwhile.
    before = slots.read(slot.path).digests
    changed = [name for name in before if found.get(name) != before[name]]
    if slot.id == save and changed:
        slot.give_up(
            f"{slot.path / changed[0]} is damaged: its xxh3-128 is {found.get(changed[0])}, not {before[changed[0]]}"
        )
    else:
        slot.attest(save, found, since)


class _Pace:
    """Lets a digest go on until nobody wants it any more."""

    portion = None

    def __init__(self, stopped: Callable[[], bool]) -> None:
        self._stopped = stopped

    def wait_for(self, _: int) -> None:
        if self._stopped():
            raise DigestStopped


def _digests(slot: Path, save: SaveId, names: Iterable[str], pace: _Pace) -> dict[str, str]:
    with metrics.phase("arena.digest", step=save.step):
        return {name: digest_file(slot / name, pace=pace) for name in sorted(names)}
