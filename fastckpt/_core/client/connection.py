"""Connection of a worker to the saver: requests, answers, and errors that come back as they were raised."""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from fastckpt import errors
from fastckpt._core.client import logged_sender, worker_reports
from fastckpt._core.client.save_results import SaveRequest
from fastckpt._core.client.saver_options import SaverOptions
from fastckpt._core.config import RankInfo
from fastckpt._core.format.ids import SaveId
from fastckpt._core.ipc import messages as m
from fastckpt._core.ipc.channel import Channel
from fastckpt._core.ipc.offload_messages import OffloadMessage
from fastckpt._core.memory.presence import Presence
from fastckpt._core.memory.telemetry import Line, TelemetryBlock
from fastckpt.errors import FastckptError, ProtocolError, SaverError

logger = logging.getLogger("fastckpt")

M = TypeVar("M", bound=m.Message)

_IMPORTED = time.monotonic()
"""Time at which torch and this library were imported; a forked process has the time of its parent."""

CONNECT_TIMEOUT = 60.0
"""Seconds to find the saver: under plain torchrun the first local rank has to start it."""
WELCOME_TIMEOUT = 180.0
"""Seconds for the answer to a hello: the saver may have to ask a store over the network, which may not answer."""
TIMEOUT = 30.0
"""Seconds for an answer that needs no work."""
FETCH_TIMEOUT = 3600.0
"""Seconds for files to come from other nodes."""
RESERVE_TIMEOUT = 600.0
"""Seconds for an answer that may wait for memory to be reserved."""


class SaverClient:
    """The connection of one rank to the saver of its node; threads take turns.

    Attributes:
        arena: Path of this node's memory of the directory.
        agent_slot: Number of the saver's agent among those that share this host's memory.
        durable: History and step of the newest durable checkpoint when `pin` was called; empty for none.
        line: Line to which this worker reports its progress; nobody reads it if the saver has no memory for that.
        address: Address at which other agents find this node's memory, when `pin` was called; empty if they cannot.
        alike: Whether the files that each node has of its own were equal when they were last compared.
        lost: Saves in memory that were found bad, when `pin` was called.
        presence: The registration of this process as a writer; to be renewed before it writes.
        pins: True if `pin` was called, and `release` not yet.
        news: Checkpoints that the saver has reported durable, and that were not processed here yet, oldest first.
        saver_pid: The process that the saver is in.
    """

    def __init__(self, options: SaverOptions, place: RankInfo, address: str) -> None:
        """Connect; raises PlaceInUse if another job uses the directory, AgentLost if the saver does not answer."""
        self.place = place
        self.options = options
        self.news: deque[SaveId] = deque()
        self.durable: tuple[int, ...] = ()
        self.verified: set[Path] = set()
        self.lost: list[str] = []
        self.address, self.alike = "", False
        self.pins = False
        self._channel = Channel(address, CONNECT_TIMEOUT)
        self.saver_pid = self._channel.peer_pid
        self._turn = threading.RLock()
        hello = m.Hello(
            options.directory,
            place.local_rank,
            place.local_world_size,
            place.world_size,
            place.group_rank,
            place.restart_count,
            options.policy,
            options.verify,
            options.remote,
            options.remote_policy,
            place.rank,
            _IMPORTED,
        )
        try:
            welcome = self._ask(hello, m.Welcome, WELCOME_TIMEOUT)
            self._telemetry = _telemetry(welcome.telemetry)
            self.line = self._telemetry.line(place.local_rank) if self._telemetry else Line()
            self.presence = Presence(Path(welcome.arena))
        except (FastckptError, OSError):
            self._channel.close()
            raise
        self.arena = Path(welcome.arena)
        self.history = welcome.history
        self.agent_slot = welcome.slot
        worker_reports.opened(self)
        logged_sender.begin()

    def reserve(self, files: dict[str, int]) -> None:
        """Ask the saver to reserve images of these sizes (bytes) in the background; raises ArenaTooSmall."""
        self._ask(m.Reserve(files), m.Done, RESERVE_TIMEOUT)

    def reserve_about(self, files: dict[str, int]) -> None:
        """Ask the saver to make pages for images of about these sizes (bytes) in the background, if there is room."""
        self._ask(m.Reserve(files, about=True), m.Done, RESERVE_TIMEOUT)

    def begin(self, save: SaveId, files: dict[str, int], closed: Sequence[int] = ()) -> None:
        """Ask for a slot; the answer comes from `slot`, which this thread must call, and may be waited for later.

        ``closed`` is a rank of another node that has closed, as of `Departures.found`.
        """
        with contextlib.ExitStack() as on_failure:
            on_failure.enter_context(self._turn)
            self._channel.send(m.BeginSave(save.history, save.step, files, list(closed)))
            on_failure.pop_all()

    def slot(self) -> m.Granted | m.Skipped:
        """The answer to `begin`; raises ArenaTooSmall."""
        try:
            answer = _raised(self._channel.answer(RESERVE_TIMEOUT))
        finally:
            self._turn.release()
        if not isinstance(answer, m.Granted | m.Skipped):
            raise ProtocolError(f"{type(answer).__name__} is no answer to BeginSave")
        self.news += [SaveId(*pair) for pair in answer.persisted]
        return answer

    def committed(self, save: SaveId, request: SaveRequest, path: str = "") -> None:
        """Report that this writer's done record is in the slot, and whether to persist it, the model at ``path``."""
        overtakable = request.overtakable, request.agreed
        self._channel.send(m.Committed(save.history, save.step, request.persist, path, *overtakable))

    def uncommitted(self, save: SaveId, reason: str) -> None:
        """Report that this writer's part of a save does not come, so that nobody waits for it."""
        with contextlib.suppress(FastckptError):  # nobody is there who would
            self._channel.send(m.Uncommitted(save.history, save.step, reason))

    def pin(self) -> list[Path]:
        """The slots with whole checkpoints, newest first; they stay until `release`."""
        self.pins = True
        pinned = self._ask(m.Pin(), m.Pinned)
        self.durable = tuple(pinned.durable)
        self.verified = {Path(slot) for slot in pinned.verified}
        self.lost = pinned.lost
        self.address, self.alike = pinned.address, pinned.alike
        return [Path(slot) for slot in pinned.slots]

    def fetch(
        self, save: SaveId, attempt: str, sources: Mapping[str, Sequence[str]], *, beside: bool = False
    ) -> m.Fetched:
        """Have the saver bring files of a save from other agents' memory; they stay until `release`.

        With ``beside`` they are for a load alone, and take no slot. Raises FastckptError or OSError if none gives them
        undamaged.
        """
        self.pins = True
        wanted = {name: list(addresses) for name, addresses in sources.items()}
        return self._ask(m.Fetch(list(save), attempt, wanted, beside), m.Fetched, FETCH_TIMEOUT)

    def release(self) -> None:
        """Release the pins of `pin`, if there are any."""
        if self.pins:
            self._ask(m.Release(), m.Done)
            self.pins = False

    def report_bad(self, memory: list[list[int]], *, storage: bool, distrusted: bool = False) -> None:
        """Report bad checkpoints: those in memory (history and step), and whether some are on storage; see `m.Bad`."""
        self._ask(m.Bad(memory, storage, distrusted), m.Done)

    def report_resumed(self, tier: str, bad: list[str], abandoned: list[list[int]]) -> None:
        """Report the tier of the resumed checkpoint, if any, the bad ones, and newer ones that other nodes lack."""
        self._ask(m.Resumed(tier, bad, abandoned), m.Done)

    def report_loaded(self, save: SaveId | None, tier: str, seconds: float) -> None:
        """Report that this rank has its state, the tier, empty for none, and the seconds that the load took."""
        self._send(m.Loaded(list(save or ()), tier, seconds), "what was loaded")

    def report_decided(self, decided: m.Decided) -> None:
        """Report the intervals that were decided."""
        self._send(decided, "how often training saves")

    def report_offload(self, message: OffloadMessage) -> None:
        """Report the plan, the measurement or the end of an offload."""
        self._send(message, "what is offloaded")

    def report_logged(self, step: int, values: dict[str, float]) -> None:
        """Report values that the script has logged."""
        self._send(m.Logged(step, values), "what the script has logged")

    @property
    def is_read(self) -> bool:
        """True if the saver has read all that was sent, so that a report does not wait for it."""
        return self._channel.is_read

    def next_history(self) -> None:
        """Open the history of a further resume in this process; the same number for every rank of the node."""
        self.history = self._ask(m.NextHistory(), m.Welcome).history

    def status(self) -> m.Status:
        """The progress of persists."""
        status = self._ask(m.Ask(), m.Status)
        self.news += [SaveId(*pair) for pair in status.persisted]
        return status

    def close(self, goodbye: m.Goodbye | None = None) -> None:
        """Deregister: no save waits for this writer any more."""
        worker_reports.closing(self)
        try:
            self._ask(goodbye or m.Goodbye(), m.Done)
        except FastckptError:
            pass  # nobody waits any more
        self._channel.close()
        if self._telemetry:
            self._telemetry.close()
        self.presence.close()

    def _send(self, message: m.Message, what: str) -> None:
        try:
            self._channel.send(message)
        except FastckptError as error:
            logger.warning("could not report to the saver %s: %s", what, error)

    def _ask(self, message: m.Message, kind: type[M], timeout: float = TIMEOUT) -> M:
        with self._turn:
            answer = _raised(self._channel.ask(message, timeout))
        if not isinstance(answer, kind):
            raise ProtocolError(f"{type(answer).__name__} is no answer to {type(message).__name__}")
        return answer


def _telemetry(name: str) -> TelemetryBlock | None:
    try:
        return TelemetryBlock(name) if name else None
    except FastckptError as error:  # somebody has removed it: that is no reason not to train
        logger.warning("this worker cannot report its progress: %s", error)
        return None


def _raised(answer: m.Message) -> m.Message:
    if isinstance(answer, m.Failed):
        kind = vars(errors).get(answer.kind)
        if isinstance(kind, type) and issubclass(kind, FastckptError):
            raise kind(answer.text)
        raise SaverError(f"{answer.kind}: {answer.text}")
    return answer
