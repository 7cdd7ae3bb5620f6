"""The connection of one worker to the saver: answers its messages, and notices its end."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from fastckpt._core import metrics
from fastckpt._core.ipc import messages as m
from fastckpt._core.ipc.channel import pack, receive
from fastckpt._core.ipc.offload_messages import OffloadEnded, OffloadMeasured, OffloadPlanned
from fastckpt._core.saver.coordinator import Coordinator
from fastckpt._core.saver.worker_events import joined, record
from fastckpt.errors import FastckptError, ProtocolError

logger = logging.getLogger("fastckpt")


class WorkerConnection:
    """Serves one writer, from its hello until it hangs up or dies."""

    def __init__(
        self,
        pid: int,
        find: Callable[[m.Hello], Coroutine[Any, Any, Coordinator]],
        logged: Callable[[int, m.Logged], None],
    ) -> None:
        self._pid = pid
        self._find = find
        self._logged = logged
        self._coordinator: Coordinator | None = None
        self._rank = -1
        self._heard = time.monotonic()

    @property
    def is_writer_elsewhere(self) -> bool:
        """True if it has sent its hello, and is no part of this process."""
        return self._coordinator is not None and self._pid != os.getpid()

    @property
    def is_writer_here(self) -> bool:
        """True if it has sent its hello, and is a part of this process."""
        return self._coordinator is not None and self._pid == os.getpid()

    @property
    def silence(self) -> float:
        """Seconds since its last message."""
        return time.monotonic() - self._heard

    def may_finish(self, others: Collection["WorkerConnection"]) -> bool:
        """Return whether a save may still become whole by writers of these connections."""
        coordinator = self._coordinator
        return coordinator is not None and coordinator.awaits(
            {other._rank for other in others if other._coordinator is coordinator}
        )

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        death = _watch(self._pid, reader)
        try:
            while (message := await receive(reader)) is not None:
                self._heard = time.monotonic()
                # One message at a time, in order: a worker's commit is handled before its next begin.
                answer = await self._answer_anyway(message)
                if isinstance(message, m.UNANSWERED):
                    if isinstance(answer, m.Failed):
                        logger.warning("a %s message was lost: %s", type(message).__name__, answer.text)
                    continue
                writer.write(pack(answer))
                await writer.drain()
        finally:
            # Also after a cancelled task or a protocol error: a writer that is not listened to counts as gone.
            death()
            if self._coordinator is not None:
                self._coordinator.lost(self._rank, self._pid)

    async def _answer_anyway(self, message: m.Message) -> m.Message:
        """The answer, or the error; one of our own must not make the worker believe that the saver is gone."""
        try:
            return await self._answer(message)
        except Exception as error:
            if not isinstance(error, FastckptError | OSError):
                logger.error("the saver failed to answer a %s message", type(message).__name__, exc_info=error)
            return m.Failed(type(error).__name__, str(error))

    async def _answer(self, message: m.Message) -> m.Message:
        if isinstance(message, m.Hello):
            if message.local_rank >= message.local_world_size:
                raise ProtocolError(f"local rank {message.local_rank} of {message.local_world_size}")
            coordinator = await self._find(message)
            welcome = _welcome(coordinator, coordinator.join(message, self._pid))
            self._coordinator, self._rank = coordinator, message.local_rank  # one that is refused has nothing to lose
            self._hello = message
            joined(message, self._pid)
            return welcome
        if self._coordinator is None:
            raise ProtocolError(f"{type(message).__name__} before Hello")
        return await self._act(self._coordinator, message)

    async def _act(self, coordinator: Coordinator, message: m.Message) -> m.Message:
        match message:
            case m.BeginSave():
                return await coordinator.begin(self._rank, message)
            case m.Reserve():
                await coordinator.prepare(self._rank, message.files, about=message.about)
                return m.Done()
            case m.Pin():
                # Once a rank has begun a save, memory has changed since the saver compared it.
                verified = [] if coordinator.writers.latest else coordinator.readers.verified()
                # Pinned before the answer: the saves that it names cannot be overwritten before the worker reads them.
                held, durable = coordinator.readers.pin(self._pid), list(coordinator.tiers.newest or ())
                lost, address, alike = coordinator.readers.lost(), coordinator.peers.address, coordinator.peers.alike
                return m.Pinned(held, durable, verified, lost, address, alike)
            case m.Fetch():
                return await coordinator.fetch(message, self._pid)
            case m.NextHistory():
                answer: m.Message = _welcome(coordinator, coordinator.writers.next_history(self._rank))
            case m.Ask():
                answer = coordinator.status(self._rank)
            case _:
                self._note(coordinator, message)
                answer = m.Done()
        return answer

    def _note(self, coordinator: Coordinator, message: m.Message) -> None:
        match message:
            case m.Committed() | m.Uncommitted():
                coordinator.committed(self._rank, message)
            case m.Release():
                coordinator.readers.release(self._pid)
            case m.Bad():
                coordinator.give_up(message)
            case m.Resumed():
                coordinator.readers.resumed(message)
            case m.Loaded() | m.Decided() | OffloadPlanned() | OffloadMeasured() | OffloadEnded():
                record(self._hello, self._pid, message, coordinator.stats())
            case m.Logged():
                self._logged(self._hello.rank, message)
            case m.Goodbye():
                coordinator.leave(self._rank, message)
            case _:
                raise ProtocolError(f"{type(message).__name__} is an answer, not a question")


def _welcome(coordinator: Coordinator, history: int) -> m.Welcome:
    return m.Welcome(str(coordinator.arena.path), history, coordinator.progress.name, coordinator.agent_slot)


def _watch(pid: int, reader: asyncio.StreamReader) -> Callable[[], None]:
    """End the reader's stream when the process dies; returns a function that ends the watch.

    A socket's end is a hint alone: a forked child of the worker keeps it open.
    """
    loop = asyncio.get_running_loop()
    try:
        # A pidfd refers to this very process and becomes readable at its death, while a pid may be given to another.
        fd = os.pidfd_open(pid)
    # It died before it could be watched: the stream ends at once, as its death would have ended it.
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
