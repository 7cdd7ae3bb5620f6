"""The service that owns arenas: it runs in the agent, or under plain torchrun in the first local rank."""

import asyncio
import contextlib
import ctypes
import logging
import os
import secrets
import threading
import time
from collections.abc import Collection, Coroutine
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastckpt._core import metrics
from fastckpt._core.config import Settings
from fastckpt._core.descriptors import opened
from fastckpt._core.format.ids import SaveId
from fastckpt._core.io.copier import Copier
from fastckpt._core.io.modes import choose
from fastckpt._core.ipc import messages as m
from fastckpt._core.ipc.channel import bind, peer
from fastckpt._core.memory.census import sweep
from fastckpt._core.memory.telemetry import StepWindow, Telemetry
from fastckpt._core.preflight import warn_of_disk
from fastckpt._core.saver.coordinator import Coordinator
from fastckpt._core.saver.peers.agent_peers import AgentPeers, NodeMemory
from fastckpt._core.saver.peers.peer_round import PeerRound
from fastckpt._core.saver.peers.peer_server import Handler
from fastckpt._core.saver.peers.spare_prefetch import SparePrefetch
from fastckpt._core.saver.ranks_values import RanksValues
from fastckpt._core.saver.skipped_saves import warn_of_several
from fastckpt._core.saver.stats import SaverStats
from fastckpt._core.saver.worker_connection import WorkerConnection
from fastckpt._core.storage.history import Record
from fastckpt.errors import FastckptError, PlaceInUse, ProtocolError, SaverError, WrongDirectory

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

_CUT_OFF = (
    "this script has closed descriptors of the process that keeps its checkpoints in memory, as os.closerange does: "
    "what is not durable yet is kept there, and the next start resumes from it. Close descriptors before there is a "
    "checkpointer, or your own ones only, or start the script with fastckpt-run"
)


class Saver:
    """Owns shared memory, answers writers and persists; all its work runs in threads of its own.

    Attributes:
        unfinished: True if `close` has left a persist behind that would not end.
        slot: Number of this agent among those that share this host's memory; None where the ranks of nodes decide.
        prefetch: Files of others that this node fetches while it is a spare.
        misplaced: Reason why this host can take no part in its job: its checkpoint directory is not the job's. Else
            empty.
    """

    def __init__(self, settings: Settings, address: str = "") -> None:
        choose(settings.mode)
        # An abstract socket: no file is left if this process is killed.
        # Random, because another user could bind a name that can be guessed.
        self.address = address or f"@fastckpt-{os.getpid()}-{secrets.token_hex(8)}"
        self._settings = settings
        self._copier = Copier(settings.persist_mbps)
        self.unfinished = False
        self.slot: int | None = None
        self._peers = AgentPeers(self._memory_of, settings.replica_mbps)
        self.prefetch = self._peers.prefetch = SparePrefetch(settings, self._bytes_of)
        self._logged = RanksValues()
        self._shut_out = self.misplaced = ""
        self._ending = threading.Event()
        self._entering: Coordinator | None = None
        self._coordinators: dict[str, Coordinator] = {}
        self._opening = asyncio.Lock()
        self._listener: tuple[int, tuple[int, int] | None] = (-1, None)
        self._connections: dict[asyncio.Task[None], WorkerConnection] = {}
        self._refused: set[int] = set()
        self._loop = asyncio.new_event_loop()
        # A thread beside torch's agent: its rendezvous and monitor loop block, and workers need answers meanwhile.
        self._thread = threading.Thread(target=self._run, name="fastckpt-saver", daemon=True)

    def start(self) -> None:
        """Listen at `address`, which workers find in FASTCKPT_AGENT."""
        warn_of_disk(self._settings)
        self._thread.start()
        self._call(self._listen()).result(START_TIMEOUT)

    def breakpoint(self) -> None:
        """Pin the newest checkpoint in memory and begin to flush it; call when all workers are dead and reaped."""

        async def restart() -> None:
            # In the event loop, as everything that touches a coordinator: it has no locks.
            for coordinator in self._coordinators.values():
                coordinator.restart()

        self._call(restart()).result(START_TIMEOUT)

    def serve(self, request: str, handler: Handler) -> None:
        """Have requests of other agents of this name carried out in threads; call it before `serve_peers`."""
        self._peers.handle(request, handler)

    def serve_peers(self) -> int:
        """Listen for the agents of other nodes; returns the port."""
        return self._peers.serve()

    def meet(self, round: PeerRound) -> None:
        """Take part in a new round; its agents give each other files of saves."""
        lost = self._peers.assume(round)

        async def assume() -> None:
            for coordinator in self._coordinators.values():
                await coordinator.begin_round(round)
                if lost:
                    coordinator.persister.nodes_lost()
            if self._entering is not None:  # it may wait for nodes of this very round
                await self._entering.begin_round(round)

        self._call(assume()).result(START_TIMEOUT)

    def _memory_of(self, directory: str) -> NodeMemory:
        if (coordinator := self._coordinators.get(directory)) is None:
            raise FastckptError(f"this node has nothing of {directory} in memory")
        peers = coordinator.peers
        return NodeMemory(coordinator.arena.path, [*coordinator.slots], peers.replicas, peers.parity)

    def _bytes_of(self, directory: str) -> int:
        """Bytes in slots, and in copies for others, that this node has for a directory; in any thread."""
        coordinator = self._coordinators.get(directory)
        return coordinator.bytes() if coordinator else 0

    def flush(self, *, ends: bool = False) -> None:
        """Begin to flush the newest checkpoint in memory; call when workers are asked to end, which may take long.

        With ``ends`` the job ends with them.
        """

        async def flush() -> None:
            for coordinator in self._coordinators.values():
                coordinator.flush(ends=ends)

        self._call(flush()).result(START_TIMEOUT)

    def in_memory(self) -> dict[str, list[SaveId]]:
        """The checkpoints that are whole in memory, by checkpoint directory; at any time."""
        return {
            directory: sorted(save for slot in [*coordinator.slots] if (save := slot.whole))
            for directory, coordinator in list(self._coordinators.items())
        }

    def persist(self, directory: str, save: SaveId) -> str:
        """Begin to persist a checkpoint that is in memory, while workers run, with any settings.

        Returns "begun"; "known" if it or a newer one is durable, or on its way; "gone" if it is not there any more.
        """

        async def persist() -> str:
            coordinator = self._coordinators.get(directory)
            return coordinator.persist(save) if coordinator else "gone"

        return self._call(persist()).result(START_TIMEOUT)

    def let_copies_end(self, dead: Collection[int]) -> None:
        """Wait, up to `WRITERS_TIMEOUT`, until saves that ranks are copying are whole; ``dead`` local ranks copy none.

        Call when a worker has ended by an exception, before the others are killed: the save before it may be under way.
        """

        async def wait() -> None:
            end = time.monotonic() + WRITERS_TIMEOUT
            while (
                any(coordinator.is_copying(dead) for coordinator in self._coordinators.values())
                and time.monotonic() < end
            ):
                await asyncio.sleep(COPY_PAUSE)

        self._call(wait()).result(WRITERS_TIMEOUT + START_TIMEOUT)

    @property
    def deserted(self) -> bool:
        """True if all writers of all checkpoint directories have deregistered."""

        async def ask() -> bool:
            return all(coordinator.writers.deserted for coordinator in self._coordinators.values())

        return self._is_cut_off or self._call(ask()).result(START_TIMEOUT)

    def report(self) -> list[SaverStats]:
        """Return the outcome of the checkpoints of each directory; at any time."""
        return [coordinator.stats() for coordinator in list(self._coordinators.values())]

    def logged(self) -> dict[int, tuple[int, dict[str, float]]]:
        """The newest values that each rank has logged, and the step of the newest of them; at any time."""
        return self._logged.by_rank()

    def arenas(self) -> dict[str, Path]:
        """Arena of each checkpoint directory; at any time."""
        return {directory: coordinator.arena.path for directory, coordinator in [*self._coordinators.items()]}

    def marks(self) -> dict[str, str]:
        """The mark of each checkpoint directory that has one, by directory; at any time."""
        claims = {directory: coordinator.arena.claim for directory, coordinator in [*self._coordinators.items()]}
        return {directory: claim.seen for directory, claim in claims.items() if claim.seen}

    @property
    def lost(self) -> str:
        """Reason why the workers may not save any more: another job has taken their place. Empty while they may."""
        # A copy of the values: the agent's thread reads them while the loop may add one.
        return next(filter(None, (coordinator.tiers.lost for coordinator in [*self._coordinators.values()])), "")

    @property
    def may_start_over(self) -> bool:
        """True if they may save after a restart: no other job has their place, or they go on from its checkpoints."""
        return not self._shut_out and all(
            coordinator.tiers.may_start_over for coordinator in [*self._coordinators.values()]
        )

    @property
    def taken_by(self) -> Record | None:
        """The record of the job, or half of it, that has replaced this one; None if none has."""
        return next(filter(None, (coordinator.tiers.lost_to for coordinator in [*self._coordinators.values()])), None)

    @property
    def awaited(self) -> Record | None:
        """The record of the job that the first worker here waits for; None if it does not wait."""
        entering = self._entering  # the loop may change it
        return entering.tiers.awaited if entering else None

    def may_return(self) -> bool:
        """Return whether that job has left; blocks, and is to be called about once a second."""
        try:
            return all(coordinator.tiers.may_return() for coordinator in [*self._coordinators.values()])
        except FastckptError as error:
            logger.debug("%s", error)
            return False

    @property
    def ended_elsewhere(self) -> bool:
        """True if that job has ended well, as `may_return` has seen."""
        lost = [coordinator.tiers for coordinator in [*self._coordinators.values()] if coordinator.tiers.lost_to]
        return bool(lost) and all(tiers.ended_elsewhere for tiers in lost)

    def telemetry(self) -> dict[str, list[Telemetry]]:
        """The last telemetry of each local rank, by checkpoint directory; at any time, also when all have ended."""
        found: dict[str, list[Telemetry]] = {}
        for directory, coordinator in list(self._coordinators.items()):
            found[directory] = coordinator.progress.read()
        return found

    def windows(self) -> dict[str, list[list[StepWindow]]]:
        """The newest windows of steps of each local rank, by checkpoint directory; at any time."""
        return {directory: coordinator.progress.windows() for directory, coordinator in [*self._coordinators.items()]}

    def close(self, *, failed: bool = False, finished: bool = False) -> None:
        """Flush saves in memory that are newer than storage, then remove the arenas; waits up to ``flush_timeout``.

        Of a job that has ``finished`` no other node has to run the end.

        Before that, writers in other processes have time to finish. If this process has ``failed``, they may be waiting
        for its own rank: they have time only while they may still make a save whole. If it ends with a checkpointer
        open, it may have failed, too, as only its exit code shows: they have time as long as they send messages.
        """
        if self._loop.is_closed():
            return
        if self._is_cut_off:
            self._abandon()
            return
        self.prefetch.close()
        self._peers.close()
        closing = self._call(self._close(failed=failed, finished=finished))
        closing.result(self._settings.flush_timeout + WRITERS_TIMEOUT + CLOSE_TIMEOUT)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        except OSError:
            if not self._is_cut_off:
                raise

    def _call(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._is_cut_off:  # the loop's own descriptors are gone, too: it would never be woken
            work.close()
            raise SaverError(_CUT_OFF)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _listen(self) -> None:
        listener = bind(self.address)
        self._server = await asyncio.start_unix_server(self._accept, sock=listener)
        self._listener = listener.fileno(), opened(listener.fileno())

    @property
    def _is_cut_off(self) -> bool:
        """True if the script has closed the descriptors of this process, with a saver in the same process."""
        number, own = self._listener
        return own is not None and opened(number) != own

    def _abandon(self) -> None:
        """End without a flush: it cannot be waited for."""
        logger.error(_CUT_OFF)
        self.unfinished = True
        # Kept for ever: the end of its sockets would close numbers that may be other files' of the script by now.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    async def _close(self, *, failed: bool, finished: bool) -> None:
        # 1. end waits for other jobs   2. let writers finish saves that may become whole   3. no new connections
        # 4. flush and close all directories at once   5. hang up on workers
        self._ending.set()
        if self._entering is not None:
            self._entering.tiers.stop()  # it may be waiting for another job
        await self._let_finish(failed=failed)
        self._listener = -1, None
        self._server.close()
        # At once, so that a storage that does not answer keeps none of the time from the others.
        ends = await asyncio.gather(
            *(coordinator.close(finished=finished) for coordinator in self._coordinators.values()),
            return_exceptions=True,
        )
        self.unfinished = not all(end is True for end in ends)
        for error in (end for end in ends if isinstance(end, BaseException)):
            logger.error("a checkpoint directory could not be closed", exc_info=error)
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _let_finish(self, *, failed: bool) -> None:
        end = time.monotonic() + WRITERS_TIMEOUT
        hurries = failed or any(connection.is_writer_here for connection in self._connections.values())
        # Messages of a writer may still be on their way, while its records are in memory already.
        with contextlib.suppress(OSError):  # that one looks again once it flushes
            for coordinator in self._coordinators.values() if hurries else ():
                coordinator.look()
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
        # SO_PEERCRED, which the kernel fills in: any user of the host can connect to an abstract socket.
        pid, uid = peer(writer.get_extra_info("socket"))
        connection = self._connections[task] = WorkerConnection(pid, self._coordinator, self._logged.put)
        try:
            if uid != os.getuid():
                self._refuse(pid, uid)
                return
            await connection.serve(reader, writer)
        except ProtocolError as error:
            logger.warning("disconnected process %d: %s", pid, error)
        except (ConnectionError, asyncio.CancelledError):
            pass  # the worker died, or the job ends
        finally:
            del self._connections[task]
            writer.close()

    def _refuse(self, pid: int, uid: int) -> None:
        metrics.counts["refused_connections"] += 1
        if uid not in self._refused:  # once: else they could fill up the log
            logger.warning("refused process %d of user %d; later refusals of this user are not logged", pid, uid)
        self._refused.add(uid)

    async def _coordinator(self, hello: m.Hello) -> Coordinator:
        """The coordinator of the worker's checkpoint directory."""
        # One at a time: the ranks of a node send hello at once, and the first makes the coordinator for all.
        async with self._opening:
            warn_of_several(hello, {each: of.writers.ranks for each, of in self._coordinators.items()})
            # 1. remove memory that nobody owns   2. wait for the
            # arena, in a thread   3. adopt, or give up its saves
            if hello.directory not in self._coordinators:
                loop = asyncio.get_running_loop()
                # Memory that nobody owns is removed before more is
                # reserved, and in a thread: a GiB takes 0.2 s to release.
                await loop.run_in_executor(None, sweep, Path(self._settings.arenas))
                slot = hello.group_rank if self.slot is None else self.slot
                # Not here: for the arena of an owner that has just died one may have to wait.
                make = partial(
                    Coordinator, hello, self._settings, self._copier, self.address, self._ending, slot, self._peers
                )
                try:
                    coordinator = self._entering = await loop.run_in_executor(None, make)
                    await self._open(coordinator)
                except PlaceInUse as error:
                    self._shut_out = str(error)
                    raise
                except WrongDirectory as error:
                    self.misplaced = str(error)
                    raise
                finally:
                    self._entering = None
                self._coordinators[hello.directory] = coordinator
            else:
                await self._assume(self._coordinators[hello.directory], hello)
            return self._coordinators[hello.directory]

    async def _assume(self, coordinator: Coordinator, hello: m.Hello) -> None:
        try:
            await coordinator.assume(hello)
        except PlaceInUse as error:
            self._shut_out = str(error)
            raise

    async def _open(self, coordinator: Coordinator) -> None:
        async with contextlib.AsyncExitStack() as on_failure:
            # The arena is locked and perhaps adopted by now: without this a failed start would keep or lose its memory.
            on_failure.push_async_callback(coordinator.abandon)
            await coordinator.open()
            on_failure.pop_all()
