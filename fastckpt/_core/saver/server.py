"""The service that owns arenas: it runs in the agent, or under plain torchrun in the first local rank."""

import asyncio
import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from fastckpt._core import metrics
from fastckpt._core.config import Settings
from fastckpt._core.ipc import messages as m
from fastckpt._core.ipc.channel import bind, pack, peer, receive
from fastckpt._core.memory.census import sweep
from fastckpt._core.memory.telemetry import Telemetry
from fastckpt._core.preflight import warn_of_disk
from fastckpt._core.saver.coordinator import Coordinator
from fastckpt._core.saver.stats import SaverStats
from fastckpt._core.saver.worker_events import joined, record
from fastckpt._core.storage.io.copier import Copier
from fastckpt._core.storage.io.modes import choose
from fastckpt.errors import FastckptError, PlaceInUse, ProtocolError

logger = logging.getLogger("fastckpt")

T = TypeVar("T")
WRITERS_TIMEOUT = 30.0
"""Seconds that writers have to finish when the saver is to end."""
CLOSE_TIMEOUT = 60.0
"""Seconds, beside those of the flush, to give memory back."""
COPY_PAUSE = 0.005
"""Seconds between two looks at whether copies have ended."""
GLANCE = 0.05
"""Seconds after which a process that has failed, or may have, looks again whether they have."""
SILENCE = 0.5
"""Seconds without a word after which they count as waiting for this process, if that ends with checkpointers open."""
START_TIMEOUT = 10.0
"""Seconds for the service to listen, and to answer the agent."""


class Saver:
    """Owns shared memory, answers writers and persists; all its work runs in threads of its own.

    Attributes:
        unfinished: Whether `close` has left a persist behind that would not end.
    """

    def __init__(self, settings: Settings, address: str = "") -> None:
        choose(settings.mode)
        self.address = address or f"@fastckpt-{os.getpid()}-{secrets.token_hex(8)}"
        self._settings = settings
        self._copier = Copier(settings.persist_mbps)
        self.unfinished = False
        self._shut_out = ""
        self._ending = threading.Event()
        self._entering: Coordinator | None = None
        self._keepers: dict[tuple[str, int], Coordinator] = {}
        self._opening = asyncio.Lock()
        self._connections: dict[asyncio.Task[None], _Connection] = {}
        self._refused: set[int] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fastckpt-saver", daemon=True)

    def start(self) -> None:
        """Listen at `address`, which workers find in FASTCKPT_AGENT."""
        warn_of_disk(self._settings)
        self._thread.start()
        self._call(self._listen()).result(START_TIMEOUT)

    def breakpoint(self) -> None:
        """Pin the newest checkpoint in memory and begin to flush it; call when all workers are dead and reaped."""

        async def restart() -> None:
            for keeper in self._keepers.values():
                keeper.restart()

        self._call(restart()).result(START_TIMEOUT)

    def flush(self) -> None:
        """Begin to flush the newest checkpoint in memory; call when workers are told to end, which may take long."""

        async def flush() -> None:
            for keeper in self._keepers.values():
                keeper.flush()

        self._call(flush()).result(START_TIMEOUT)

    def let_copies_end(self, dead: Collection[int]) -> None:
        """Wait until what ranks are copying is whole, for up to `WRITERS_TIMEOUT`; local ranks that are dead copy not.

        Call when a worker has ended by an exception, before the others are killed: the save before it may be under way.
        """

        async def wait() -> None:
            end = time.monotonic() + WRITERS_TIMEOUT
            while any(keeper.is_copying(dead) for keeper in self._keepers.values()) and time.monotonic() < end:
                await asyncio.sleep(COPY_PAUSE)

        self._call(wait()).result(WRITERS_TIMEOUT + START_TIMEOUT)

    @property
    def deserted(self) -> bool:
        """Whether all writers of all checkpoint directories have taken leave."""

        async def ask() -> bool:
            return all(keeper.writers.deserted for keeper in self._keepers.values())

        return self._call(ask()).result(START_TIMEOUT)

    def report(self) -> list[SaverStats]:
        """What became of the checkpoints of each directory; at any time."""
        return [keeper.persister.tally for keeper in list(self._keepers.values())]

    @property
    def lost(self) -> str:
        """Why the workers may not save any more: another job has come in their place. Empty while they may."""
        return next(filter(None, (keeper.levels.lost for keeper in [*self._keepers.values()])), "")

    @property
    def may_start_over(self) -> bool:
        """Whether they may after a restart: no other job is in their place, or they go on from what it has left."""
        return not self._shut_out and all(keeper.levels.may_start_over for keeper in [*self._keepers.values()])

    def telemetry(self) -> dict[str, list[Telemetry]]:
        """What each local rank said last, by checkpoint directory; at any time, also when all have ended."""
        found: dict[str, list[Telemetry]] = {}
        for (directory, _), keeper in list(self._keepers.items()):  # one more if this node's rank has changed
            found[directory] = max(found.get(directory, []), keeper.progress.read(), key=_last_beat)
        return found

    def close(self, *, failed: bool = False) -> None:
        """Flush what memory holds newer than storage, then remove the arenas; waits up to ``flush_timeout``.

        Before that, writers in other processes have a moment to finish; if this process has ``failed``, whose own rank
        the others may be waiting for, only as long as a save may still become whole by them. One that ends with a
        checkpointer open may have failed, too, and said so by its exit code alone: they have it as long as they talk.
        """
        if self._loop.is_closed():
            return
        self._call(self._close(failed=failed)).result(self._settings.flush_timeout + WRITERS_TIMEOUT + CLOSE_TIMEOUT)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        self._loop.run_forever()

    def _call(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _listen(self) -> None:
        self._server = await asyncio.start_unix_server(self._accept, sock=bind(self.address))

    async def _close(self, *, failed: bool) -> None:
        self._ending.set()
        if self._entering is not None:
            self._entering.levels.stop()  # it may be waiting for another job
        await self._let_finish(failed=failed)
        self._server.close()
        # At once, so that a storage that does not answer keeps none of the time from the others.
        ends = await asyncio.gather(*(keeper.close() for keeper in self._keepers.values()), return_exceptions=True)
        self.unfinished = not all(end is True for end in ends)
        for error in (end for end in ends if isinstance(end, BaseException)):
            logger.error("a checkpoint directory could not be left in order", exc_info=error)
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _let_finish(self, *, failed: bool) -> None:
        end = time.monotonic() + WRITERS_TIMEOUT
        hurries = failed or any(connection.is_writer_here for connection in self._connections.values())
        for keeper in self._keepers.values() if hurries else ():
            keeper.look()
        while (left := end - time.monotonic()) > 0:
            writers = {task: c for task, c in self._connections.items() if c.is_writer_elsewhere}
            talks = not failed and any(c.silence < SILENCE for c in writers.values())
            may_finish = talks or any(c.may_finish(writers.values()) for c in writers.values())
            if not writers or (hurries and not may_finish):
                return
            await asyncio.wait(writers, timeout=min(left, GLANCE) if hurries else left)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        pid, uid = peer(writer.get_extra_info("socket"))
        connection = self._connections[task] = _Connection(pid, self._keeper)
        try:
            if uid != os.getuid():
                self._refuse(pid, uid)
                return
            await connection.serve(reader, writer)
        except ProtocolError as error:
            logger.warning("hung up on process %d: %s", pid, error)
        except (ConnectionError, asyncio.CancelledError):
            pass  # the worker died, or the job ends
        finally:
            del self._connections[task]
            writer.close()

    def _refuse(self, pid: int, uid: int) -> None:
        metrics.counts["refused_connections"] += 1
        if uid not in self._refused:  # once: else they could fill up the log
            logger.warning("refused process %d of user %d, and all others of that user", pid, uid)
        self._refused.add(uid)

    async def _keeper(self, hello: m.Hello) -> Coordinator:
        """The keeper of the worker's checkpoint directory."""
        async with self._opening:
            key = (hello.directory, hello.group_rank)
            if key not in self._keepers:
                for (directory, _), former in self._keepers.items():
                    if directory == hello.directory:
                        await former.levels.step_down()
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(None, sweep, Path(self._settings.arenas))
                # Not here: for the arena of an owner that has just died one may have to wait.
                make = partial(Coordinator, hello, self._settings, self._copier, self.address, self._ending)
                try:
                    keeper = self._entering = await loop.run_in_executor(None, make)
                    await self._open(keeper)
                except PlaceInUse as error:
                    self._shut_out = str(error)
                    raise
                finally:
                    self._entering = None
                self._keepers[key] = keeper
            return self._keepers[key]

    async def _open(self, keeper: Coordinator) -> None:
        async with contextlib.AsyncExitStack() as on_failure:
            on_failure.push_async_callback(keeper.abandon)
            await keeper.open()
            on_failure.pop_all()


class _Connection:
    """Serves one writer, from its hello until it hangs up or dies."""

    def __init__(self, pid: int, find: Callable[[m.Hello], Coroutine[Any, Any, Coordinator]]) -> None:
        self._pid = pid
        self._find = find
        self._keeper: Coordinator | None = None
        self._rank = -1
        self._heard = time.monotonic()

    @property
    def is_writer_elsewhere(self) -> bool:
        """Whether it has said hello, and is no part of this process."""
        return self._keeper is not None and self._pid != os.getpid()

    @property
    def is_writer_here(self) -> bool:
        """Whether it has said hello, and is a part of this process."""
        return self._keeper is not None and self._pid == os.getpid()

    @property
    def silence(self) -> float:
        """Seconds since its last message."""
        return time.monotonic() - self._heard

    def may_finish(self, others: Collection["_Connection"]) -> bool:
        """Whether a save may still become whole by writers of these connections."""
        keeper = self._keeper
        return keeper is not None and keeper.awaits({other._rank for other in others if other._keeper is keeper})

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        death = _watch(self._pid, reader)
        try:
            while (message := await receive(reader)) is not None:
                self._heard = time.monotonic()
                answer = await self._answer_anyway(message)
                if isinstance(message, m.UNANSWERED):
                    continue
                writer.write(pack(answer))
                await writer.drain()
        finally:
            death()
            if self._keeper is not None:
                self._keeper.lost(self._rank, self._pid)

    async def _answer_anyway(self, message: m.Message) -> m.Message:
        """The answer, or the error; one of our own must not make the worker believe that the saver is gone."""
        with _Failure() as failure:
            return await self._answer(message)
        error = failure.error
        if not isinstance(error, FastckptError | OSError):
            logger.error("%s could not be answered", type(message).__name__, exc_info=error)
        return m.Failed(type(error).__name__, str(error))

    async def _answer(self, message: m.Message) -> m.Message:
        if isinstance(message, m.Hello):
            if message.local_rank >= message.local_world_size:
                raise ProtocolError(f"local rank {message.local_rank} of {message.local_world_size}")
            keeper = await self._find(message)
            welcome = _welcome(keeper, keeper.join(message, self._pid))
            self._keeper, self._rank = keeper, message.local_rank  # one that is refused has nothing to lose
            self._hello = message
            joined(message, self._pid)
            return welcome
        if self._keeper is None:
            raise ProtocolError(f"{type(message).__name__} before Hello")
        return await self._act(self._keeper, message)

    async def _act(self, keeper: Coordinator, message: m.Message) -> m.Message:
        match message:
            case m.BeginSave():
                return await keeper.begin(self._rank, message)
            case m.Reserve():
                await keeper.prepare(self._rank, message.files)
                return m.Done()
            case m.Pin():
                verified = [] if keeper.writers.latest else keeper.readers.verified()
                held, durable = keeper.readers.pin(self._pid), list(keeper.levels.newest or ())
                return m.Pinned(held, durable, verified, keeper.readers.lost())
            case m.NextHistory():
                return _welcome(keeper, keeper.writers.next_history(self._rank))
            case m.Ask():
                return keeper.status(self._rank)
        self._note(keeper, message)
        return m.Done()

    def _note(self, keeper: Coordinator, message: m.Message) -> None:
        match message:
            case m.Committed():
                keeper.committed(self._rank, message)
            case m.Release():
                keeper.readers.release(self._pid)
            case m.Bad():
                keeper.give_up(message)
            case m.Resumed():
                keeper.readers.resumed(message)
            case m.Loaded() | m.Decided():
                record(self._hello, message)
            case m.Goodbye():
                keeper.leave(self._rank, message)
            case _:
                raise ProtocolError(f"{type(message).__name__} is an answer, not a question")


class _Failure:
    """Keeps the error that ended its with block; nobody else hears of it."""

    error: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.error = error if isinstance(error, Exception) else None
        return self.error is not None


def _last_beat(lines: list[Telemetry]) -> int:
    return max([line.beat for line in lines], default=-1)


def _welcome(keeper: Coordinator, history: int) -> m.Welcome:
    return m.Welcome(str(keeper.arena.path), history, keeper.progress.name)


def _watch(pid: int, reader: asyncio.StreamReader) -> Callable[[], None]:
    """End the reader's stream when the process dies; returns what ends the watch.

    A socket's end is a hint alone: a forked child of the worker keeps it open.
    """
    loop = asyncio.get_running_loop()
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        reader.feed_eof()
        return lambda: None

    def stop() -> None:
        nonlocal fd
        if fd >= 0:  # else another watch may have the number by now
            loop.remove_reader(fd)
            os.close(fd)
            fd = -1

    def died() -> None:
        metrics.event("writer_died", worker=pid)
        reader.feed_eof()
        stop()

    loop.add_reader(fd, died)
    return stop
