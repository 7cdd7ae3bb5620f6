"""Prefetch of a spare: while it waits, it brings the files that the job would miss most into its memory.

It asks the first agent of the round for the save that all nodes hold, and for the node with the fewest copies of its
files. It takes the files that this node alone has, one save at a time. Nothing counts on them before the spare has a
rank: then they are copies like those that this node keeps of other nodes.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastckpt._core import metrics
from fastckpt._core.byte_sizes import binary
from fastckpt._core.config import Settings
from fastckpt._core.format.ids import SaveId
from fastckpt._core.ipc.sealed import SealedConnection, reading
from fastckpt._core.memory.census import sweep
from fastckpt._core.memory.headroom import headroom
from fastckpt._core.memory.held_saves import keep
from fastckpt._core.memory.slots import SlotDone
from fastckpt._core.policy.replicas.copy_sizes import SMALL, room
from fastckpt._core.saver.arena_location import place
from fastckpt._core.saver.peers.file_transfer import (
    LIST,
    TIMEOUT,
    SaveName,
    ask_for,
    digest_of_bytes,
    parts_of,
    received,
)
from fastckpt._core.saver.peers.staged_save import StagedSave
from fastckpt.errors import BadCheckpoint, FastckptError, ProtocolError

logger = logging.getLogger("fastckpt")

PREFETCH, BACKGROUND = "prefetch", "background"
"""The request for the saves to prefetch; and the key by which a file is sent no faster than copies."""
RETRY = 1.0
"""Seconds until a failed request is tried again."""
LAST = 1.0
"""Seconds that a spare which has a rank waits for the end of a file that it gives up."""


@dataclass(frozen=True)
class SaveAtRisk:
    """The newest save that all nodes hold, and the node with the fewest copies of its files.

    Attributes:
        attempt: The token of the save.
        address: Address of the node's agent.
        host: Its host's name.
        copies: Copies of its large files that other nodes keep.
    """

    id: SaveId
    attempt: str
    address: str
    host: str
    copies: int

    def to_json(self) -> dict[str, Any]:
        """Return a part of a message."""
        return asdict(self) | {"id": list(self.id)}

    @classmethod
    def from_json(cls, record: Any) -> "SaveAtRisk":
        """The one in a message; raises ProtocolError."""
        match record:
            case {
                "id": [int(history), int(step)],
                "attempt": str(attempt),
                "address": str(address),
                "host": str(host),
                "copies": int(copies),
            }:
                return cls(SaveId(history, step), attempt, address, host, copies)
        raise ProtocolError("the message names no save to prefetch")


@dataclass(frozen=True)
class NodeFiles:
    """Files of a save that only one node has.

    Attributes:
        sizes: Bytes of its files, by name.
        digests: xxh3-128 of files for which the node knows it.
        parts: The done records of its ranks, by rank.
        slot: Bytes that a slot with its part of the save takes.
    """

    sizes: Mapping[str, int]
    digests: Mapping[str, str]
    parts: Mapping[int, SlotDone]
    slot: int

    @classmethod
    def from_json(cls, id: SaveId, answer: Mapping[str, Any]) -> "NodeFiles":
        """Read an answer to `LIST`; raises ProtocolError, LookupError, TypeError or ValueError."""
        own, common = {*map(str, answer["own"])}, {*answer["common"]}
        parts = {r: part for r, part in parts_of({**answer, "id": list(id)}).items() if own & part.files.keys()}
        sizes = {name: size for part in parts.values() for name, size in part.files.items() if name not in common}
        slot = sum({name: size for part in parts.values() for name, size in part.files.items()}.values())
        return cls(sizes, {str(name): str(digest) for name, digest in answer["digests"].items()}, parts, slot)

    @property
    def large(self) -> dict[str, int]:
        """The sizes of its large files."""
        return {name: size for name, size in self.sizes.items() if size > SMALL}


class SparePrefetch:
    """The prefetch of a spare, in a thread of its own between `begin` and `end`.

    Args:
        settings: Settings of the job.
        present: Bytes that this node has in slots and copies for a directory already.
    """

    def __init__(self, settings: Settings, present: Callable[[str], int]) -> None:
        self._settings, self._present = settings, present
        self._staged: dict[str, StagedSave] = {}
        self._known: dict[str, Any] = {}
        self._link: SealedConnection | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_warned = False

    def begin(self, first: Callable[[], str], secret: bytes) -> None:
        """Prefetch while this node waits for a rank.

        Args:
            first: Finds the address of the first agent of the round; empty if it is not known yet. It may raise
                FastckptError or OSError.
            secret: The secret of the job.
        """
        self.end()
        self._ended, self._known = threading.Event(), {}
        arguments = (first, secret, self._ended)
        self._thread = threading.Thread(target=self._run, args=arguments, name="fastckpt-prefetch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Give up the save that is on its way, at once; a whole one stays."""
        with self._lock:
            self._ended.set()
            if self._link is not None:
                self._link.abort()
        if self._thread is not None:
            self._thread.join(LAST)
        self._thread = None

    def hand_over(self, directory: str, arena: Path, lock: threading.RLock) -> None:
        """End, and add the prefetched files of a directory to its arena's copies of other nodes' files.

        The ``lock`` is that of the copies' records.
        """
        self.end()
        if (staged := self._staged.pop(directory, None)) is None:
            return
        try:
            with lock:
                staged.move(arena)
        except OSError as error:
            logger.warning("the prefetched files of %s are lost: %s", directory, error)
        staged.arena.remove()

    def close(self) -> None:
        """End, and give the memory back."""
        self.end()
        while self._staged:
            self._staged.popitem()[1].arena.remove()

    def _run(self, first: Callable[[], str], secret: bytes, ended: threading.Event) -> None:
        sweep(Path(self._settings.arenas))  # a spare that was killed has left its files
        while not ended.is_set():
            try:
                if address := first():
                    with reading("what another agent says of its saves"):
                        self._follow(address, secret, ended)
            except (FastckptError, OSError) as error:
                logger.debug("nothing is prefetched: %s", error)
            ended.wait(RETRY)

    def _follow(self, address: str, secret: bytes, ended: threading.Event) -> None:
        """Ask for the saves to prefetch, and prefetch them, again and again."""
        while not ended.is_set():
            with self._linked(address, secret, ended) as link:
                saves = link.ask({"ask": PREFETCH, "known": self._known})["saves"]
            for directory, save in saves.items():
                if save != self._known.get(directory):
                    self._prefetch(directory, SaveAtRisk.from_json(save), secret, ended)
            self._known = saves

    @contextlib.contextmanager
    def _linked(self, address: str, secret: bytes, ended: threading.Event) -> Any:
        """A connection that `end` cuts off."""
        with contextlib.closing(SealedConnection.connect(address, secret, TIMEOUT)) as link:
            with self._lock:
                if ended.is_set():
                    raise FastckptError("this node has a rank")
                self._link = link
            try:
                yield link
            finally:
                with self._lock:
                    self._link = None if self._link is link else self._link

    def _prefetch(self, directory: str, risk: SaveAtRisk, secret: bytes, ended: threading.Event) -> None:
        """Bring the files of a save that a node alone has; earlier ones are released once these are whole."""
        since, save = time.perf_counter(), SaveName(directory, risk.id, risk.attempt)
        with self._linked(risk.address, secret, ended) as link:
            files = NodeFiles.from_json(risk.id, link.ask(save.request(LIST)))
            staged = self._staged.get(directory)
            is_there = staged is not None and staged.whole == (save, risk.address)
            if is_there or not files.large or not self._has_room(directory, risk, files):
                return
            if directory not in self._staged:
                self._staged[directory] = StagedSave(self._settings, directory)
            staged = self._staged[directory]
            staged.make_way(save)
            with metrics.phase("spare.prefetch", step=risk.id.step):
                _bring(link, save, files, staged)
        staged.finish(save, risk.address)
        size, seconds = sum(files.large.values()), time.perf_counter() - since
        metrics.event(
            "prefetched", history=risk.id.history, step=risk.id.step, bytes=size, seconds=seconds, host=risk.host
        )

    def _has_room(self, directory: str, risk: SaveAtRisk, files: NodeFiles) -> bool:
        """Return whether there is memory for the files beside two slots and the copies; if not, log it once."""
        size, staged = sum(files.sizes.values()), self._staged.get(directory)
        copies = 1 / (self._settings.parity - 1) if self._settings.parity else self._settings.copies
        times = 2 if staged and staged.whole else 1  # a whole save stays until the next is whole
        needed = 2 * files.slot + room(files.large.values(), copies) + times * size
        found = headroom(place(self._settings))
        present = self._present(directory) + (staged.bytes if staged else 0)
        if needed - present <= found.free:
            return True
        if not self._has_warned:
            self._has_warned, more = True, needed - present
            text = "this spare prefetches nothing of %s (%s): with two slots and copies it needs %s: %s. %s"
            logger.warning(text, risk.host, binary(size), binary(more), found, found.remedies(more - found.free))
        return False


def _bring(link: SealedConnection, save: SaveName, files: NodeFiles, staged: StagedSave) -> None:
    small, digests = dict[str, bytes](), dict[str, str]()
    for name, size in files.sizes.items():
        if size <= SMALL:
            ask_for(link, save, name, size, **{BACKGROUND: True})
            small[name] = link.receive_bytes(size)
            digests[name] = _confirmed(link, name, digest_of_bytes(small[name]), files)
        elif not staged.files.has(save.id, save.attempt, name, size, files.digests.get(name, "")):
            with staged.files.receive(save.id, save.attempt, name, size) as (descriptor, is_whole):
                ask_for(link, save, name, size, **{BACKGROUND: True})
                came = received(link, descriptor, size)
                is_whole(_confirmed(link, name, came, files))
    keep(staged.arena.path, save.id, save.attempt, files.parts, small, digests)  # the records make the rest count


def _confirmed(link: SealedConnection, name: str, came: str, files: NodeFiles) -> str:
    """The xxh3-128 of the received file, if it is that of the sent and committed one; raises BadCheckpoint."""
    tail = link.receive() or {}
    if not tail.get("held") or tail.get("digest") != came or files.digests.get(name, came) != came:
        raise BadCheckpoint(f"{name} came damaged, or is not in the memory of the other node any more")
    return came
