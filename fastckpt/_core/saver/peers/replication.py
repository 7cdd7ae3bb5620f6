"""Has other hosts keep the files that only this node has of a save, and learns the save that all nodes hold.

Without copies, the loss of a host would lose the state of its ranks. Files that each node has alike need none. Small
files are copied at each commit, large ones of the saves that all nodes turn to.
"""

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from fastckpt._core import metrics
from fastckpt._core.format.ids import SaveId
from fastckpt._core.io.direct import digest_file
from fastckpt._core.ipc.sealed import SealedConnection
from fastckpt._core.memory import slots
from fastckpt._core.memory.held_saves import HeldSave, held_saves
from fastckpt._core.policy.replicas.copy_sizes import SMALL
from fastckpt._core.saver.peers.common_saves import CommonSave, CommonSaves, HeldReport
from fastckpt._core.saver.peers.file_transfer import TIMEOUT, SaveName, give
from fastckpt._core.saver.peers.peer_round import Peer, PeerRound
from fastckpt._core.saver.peers.replica_sender import ReplicaSender
from fastckpt.errors import FastckptError

logger = logging.getLogger("fastckpt")

PER_SECOND = 10
"""Saves that are reported within a second, at most; reports that follow from an answer are not delayed."""
LAST = 1.0
"""Seconds that the end of the agent waits for the thread."""
RETRY = 1.0
"""Seconds until a report that has failed is tried again."""
GIVE_UP = 10.0
"""Seconds without an answer after which no slot is kept for the sake of other nodes."""
_TROUBLES = (FastckptError, OSError, RuntimeError)
"""The last two are also that the event loop does not come to its turn, and that no thread can be started."""
HELD = "held"
"""The request with a report."""


class Replication:
    """The copies and reports of one checkpoint directory, in a thread of its own.

    Args:
        directory: The checkpoint directory.
        arena: Arena with this node's saves.
        of: The slots.
        answered: Called in that thread with each answer, or None if there was none for long; when it returns, no slot
            that the answer protects is given away.
        common_saves: Takes the reports of this agent, if it is the first of the round.
        sender: Sends large files.
    """

    def __init__(
        self,
        directory: str,
        arena: Path,
        of: Callable[[], Iterable[Path]],
        answered: Callable[[CommonSave | None], None],
        common_saves: Callable[[str], CommonSaves],
        sender: ReplicaSender,
    ) -> None:
        self._directory, self._arena, self._slots = directory, arena, of
        self._sender = sender
        self._answered, self._common_saves = answered, common_saves
        self._round: PeerRound | None = None
        self._given: set[tuple[SaveId, str]] = set()
        self._digests: tuple[SaveId, dict[str, str]] | None = None
        self._links: dict[str, SealedConnection] = {}
        self._linked: PeerRound | None = None
        self._next: SaveId | None = None
        self._known: CommonSave | None = None
        self._aim: SaveId | None = None
        self._news, self._closed = threading.Event(), False
        self._thread: threading.Thread | None = None

    def assume(self, round: PeerRound) -> None:
        """Take part in a new round."""
        self._round = round
        self._sender.assume(round)
        if len(round.peers) > 1 and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fastckpt-replication", daemon=True)
            self._thread.start()
        self.look()

    def look(self) -> None:
        """Something was committed, or has gone."""
        self._news.set()

    def close(self) -> None:
        """End the thread, which may be waiting for another agent for a while yet."""
        self._closed = True
        self._sender.close()
        self._news.set()
        if self._thread is not None:
            self._thread.join(LAST)

    def _run(self) -> None:
        failing, warned = math.inf, False  # since when
        begun = deque([-math.inf] * PER_SECOND, PER_SECOND)
        while True:
            self._news.wait()
            if self._closed:
                break
            time.sleep(max(0.0, begun[0] + 1.0 - time.monotonic()))
            self._news.clear()
            begun.append(time.monotonic())
            self._aim = None
            try:
                while self._report() and not self._closed:
                    failing = math.inf
                failing, warned = math.inf, False
            except _TROUBLES as error:
                self._hang_up()
                self._news.set()
                failing = min(failing, time.monotonic())
                if time.monotonic() - failing > GIVE_UP and not warned:
                    warned = True
                    with contextlib.suppress(*_TROUBLES):  # it is tried again: this thread must not end
                        self._answered(None)
                    logger.warning("cannot report the saves in the memory of this node to the other nodes: %s", error)
                time.sleep(RETRY)
        self._hang_up()

    def _report(self) -> bool:
        """Copy new saves, and report the held ones; returns whether to report again at once."""
        if (round := self._round) is None or len(round.peers) < 2:
            return False
        if round is not self._linked:  # the peers of the last round may be gone
            self._hang_up()
            self._linked, self._given, self._next, self._known = round, set(), None, None
        saves = [held for held in held_saves(self._arena, self._slots()) if held.slot is not None and held.attempt]
        for held in sorted(saves, key=lambda held: held.id, reverse=True):
            if (held.id, held.attempt) not in self._given:
                self._copy(held, round)
        self._given &= {(held.id, held.attempt) for held in saves}
        ids = frozenset(id for id, _ in self._given)
        # The slots were read after the last answer had been noted: the save was not overwritten meanwhile.
        next, known, copied = self._next_of(saves), self._known, None
        if next is not None and round is self._round:
            copied = self._sender.send(next, known or CommonSave(), round)
        is_kept = next is not None and copied is not None and _is_still(next)
        report = HeldReport(round.peers[round.own].id, ids, self._next if is_kept else None, bool(copied))
        if next is not None:
            copies = 1 if round.parity else len(round.partners)
            large = sum(size for size in next.own_files.values() if size > SMALL)
            report = replace(report, copies=copies if copied else 0, large=large)
        if self._digests is not None:
            report = replace(report, compared=self._digests[0], digests=self._digests[1])
        answer = self._ask(report, known, round)
        self._answered(answer)
        self._known, self._next = answer, answer.next
        # Others may report that newest save later than this node: ask again until all hold it. Newer ones wait.
        self._aim = self._aim or max(ids, default=None)
        return self._compare(answer, saves) or answer.is_behind(self._aim)

    def _next_of(self, saves: Iterable[HeldSave]) -> HeldSave | None:
        """The save that is to be the next common one, if this node holds it."""
        return next((each for each in saves if each.id == self._next and (each.id, each.attempt) in self._given), None)

    def _copy(self, held: HeldSave, round: PeerRound) -> None:
        small = [name for name, size in held.own_files.items() if size <= SMALL]
        contents = {name: held.files[name].read_bytes() for name in small}
        if not _is_still(held):
            return  # the next save has its slot by now
        name = SaveName(self._directory, held.id, held.attempt)
        own = replace(held, parts={rank: part for rank, part in held.parts.items() if _is_in(part.files, held)})
        for peer in round.keepers:
            give(self._link(peer, round), name, own, contents)
            metrics.counts["peers.copies"] += 1
        self._given.add((held.id, held.attempt))

    def _ask(self, report: HeldReport, known: CommonSave | None, round: PeerRound) -> CommonSave:
        first = round.peers[0]
        if round.own == 0:
            common = self._common_saves(self._directory)
            return common.report(report, known, common.longest_wait)
        metrics.counts["peers.reports"] += 1
        has = known.to_json() if known else None
        request = {"ask": HELD, "directory": self._directory, "known": has, **report.to_json()}
        answer = CommonSave.from_json(self._link(first, round).ask(request))
        metrics.counts["peers.repeats"] += answer == known
        return answer

    def _compare(self, answer: CommonSave, saves: Sequence[HeldSave]) -> bool:
        """Digest the files that are to be compared, unless that is done; whether the comparison is under way."""
        if answer.compare is None:
            return False
        if self._digests is not None and self._digests[0] == answer.compare:
            return True
        held = next((held for held in saves if held.id == answer.compare), None)
        if held is None:
            return False
        common = sorted(name for name in held.common if name in held.sizes)
        digests = {name: held.digests.get(name) or digest_file(held.files[name]) for name in common}
        if _is_still(held):
            self._digests = held.id, digests
        return True

    def _link(self, peer: Peer, round: PeerRound) -> SealedConnection:
        if peer.address not in self._links:
            self._links[peer.address] = SealedConnection.connect(peer.address, round.secret, TIMEOUT)
        return self._links[peer.address]

    def _hang_up(self) -> None:
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.close()
        self._links.clear()


def _is_still(held: HeldSave) -> bool:
    """Return whether a save is still in the slot in which it was."""
    return held.slot is not None and slots.read(held.slot).committed == held.id


def _is_in(files: Iterable[str], held: HeldSave) -> bool:
    return all(held.roots.get(name) == held.slot for name in files)
