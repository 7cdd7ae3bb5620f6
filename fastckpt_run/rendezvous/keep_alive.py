"""Keep-alive of an agent: it gives signs of life, and finds nodes of its round that give none any more."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress

from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from fastckpt._core.error_codes import coded
from fastckpt.errors import FastckptError
from fastckpt_run.rendezvous.endpoints import Endpoints
from fastckpt_run.rendezvous.membership import BEFORE_THE_FIRST, Round
from fastckpt_run.rendezvous.round_store import RoundStore
from fastckpt_run.rendezvous.store_connection import StoreLost

logger = logging.getLogger("fastckpt.launcher")

_TELLING = 0.4
"""Seconds that the store of a host which is reported dead has to answer."""
_LONGEST = 30.0
"""Seconds without a sign of life in the store, after which it is of no use that a node answers elsewhere."""
SELDOM = 8
"""Looks without a bell: one in so many turns, should a bell have been lost."""


class SignsOfLife:
    """Silence of each node, by this host's clock; clocks of other hosts mean nothing here."""

    def __init__(self, timeout: float) -> None:
        """Count nodes as silent after ``timeout`` seconds."""
        self._timeout = timeout
        self._seen: dict[str, tuple[int, float, float]] = {}
        self._spared: dict[str, float] = {}
        self._lock = threading.Lock()

    def observe(self, ids: Iterable[str], beats: Mapping[str, int]) -> frozenset[str]:
        """See the newest signs of nodes; returns the silent ones."""
        now = time.monotonic()
        silent = set[str]()
        with self._lock:
            for id in ids:
                number, since, looked = self._seen.get(id, (0, now, now))
                # A node that has not looked, such as a stopped one, cannot know that the other was silent.
                if beats.get(id, 0) > number or now - looked > self._timeout:
                    number, since = max(number, beats.get(id, 0)), now
                self._seen[id] = number, since, now
                if now - since > self._timeout and now > self._spared.get(id, 0.0):
                    silent.add(id)
        return frozenset(silent)

    def spare(self, ids: Iterable[str]) -> None:
        """Give nodes that have answered otherwise as long again; but not for ever, for one may be in a deadlock."""
        with self._lock:
            for id in ids:
                _, since, looked = self._seen[id]
                self._spared[id] = min(looked, since + _LONGEST) + self._timeout


class KeepAlive:
    """A thread that gives signs of life for this agent, and watches the round in which it takes part.

    The node of rank 0 watches all others, and the others watch that one: messages grow with the number of nodes, not
    with its square. One that finds a loss reports it to all by ending the round.

    Attributes:
        signs: Signs of life of other nodes.
        rung: Set when there is something to read in the store.
        each_look: Called with the store and the round at each look at others' records there.
        answering: Returns which of some nodes are there, though they give no sign of life in the store: a
            thread that is kept from running gives none.
    """

    def __init__(self, id: str, interval: float, timeout: float, endpoints: Endpoints) -> None:
        self._id = id
        self._interval = interval
        self._endpoints = endpoints
        self.signs = SignsOfLife(timeout)
        self.rung = threading.Event()
        self.answering: Callable[[Collection[str]], frozenset[str]] = lambda ids: frozenset()
        self.each_look: Callable[[RoundStore, Round], None] = lambda store, round: None
        self._lock = threading.RLock()
        self._store: RoundStore | None = None
        self._round: Round | None = None
        self._last = BEFORE_THE_FIRST
        self._holder = ""
        self._ended = self._silent = self._replaced = False
        self._closed: Round | None = None
        self._gone = set[str]()
        self._unreached = set[str]()
        self._beat = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fastckpt-keep-alive", daemon=True)

    # --- for the agent

    @property
    def is_ended(self) -> bool:
        """True if nodes of the round are gone, or others wait to take part."""
        return self._ended and not self.is_closed

    @property
    def is_closed(self) -> bool:
        """True if any thread of this agent has read that the job was ended."""
        return self._end_of_job() is not None

    @property
    def ending(self) -> str:
        """Node that has ended the job, and why, in words; empty if that is not known."""
        closed = self._end_of_job()
        return closed.ending if closed else ""

    @property
    def store(self) -> RoundStore | None:
        """The store, if there is one that answers."""
        return None if self._silent else self._store

    @property
    def gone(self) -> frozenset[str]:
        """Ids of nodes of the last round that were found to be gone."""
        return frozenset(self._gone)

    def silent(self, ids: Collection[str], beats: Mapping[str, int]) -> frozenset[str]:
        """Return the nodes that give no sign of life, by the newest sign of each in the store."""
        late = self.signs.observe(ids, beats)
        if late and (alive := self.answering(late)):
            self.signs.spare(alive)
            late = self.signs.observe(late, beats)
        return late

    def begin(self, store: RoundStore) -> None:
        """Give signs of life in a store from now on."""
        with self._lock:
            self._end_of_job()
            self._store, self._silent = store, False
            self._give_sign(store)
        store.listen(self.rung.set)
        if not self._thread.is_alive() and not self._stop.is_set():
            self._thread.start()

    def watch(self, round: Round, holder: str) -> None:
        """Watch a round from now on; ``holder`` is the agent that holds the store."""
        with self._lock:
            self._round = self._last = round
            self._holder, self._ended = holder, False
            self._gone.clear()
            self._unreached.clear()

    def leave_round(self) -> None:
        """Have the round end for this agent."""
        with self._lock:
            self._ended = True

    def pause(self) -> RoundStore | None:
        """Watch no round until `watch`; returns the store, if there is one that answers."""
        with self._lock:
            self._round = None
            return self.store

    def give_up(self) -> None:
        """Take the store for lost."""
        with self._lock:
            self._silent = True

    def lost(self, ids: Iterable[str]) -> None:
        """Take nodes of the round for gone, whatever the store shows."""
        with self._lock:
            found = {id for id in ids if id in self._last.ranks and id != self._id} - self._gone
            self._gone |= found
            self._ended = self._ended or bool(found)
            store, round = self.store, self._last
        if store and found:
            teller = threading.Thread(target=_tell, args=(store, round, found), daemon=True)
            teller.start()
            teller.join(_TELLING)
            if teller.is_alive() and self._holder in found:
                store.connection.give_up("its host is dead")

    def isolated(self, ids: Iterable[str]) -> None:
        """Note that this node does not reach most others. If it does not reach the store either, its round ends.

        Otherwise the store shows the present nodes; a link that is down for a moment ends no round.
        """
        with self._lock:
            self._unreached |= {id for id in ids if id in self._last.ranks and id != self._id}
            is_silent = self._silent and self._round is not None
        if is_silent:
            self._end_cut_off("")

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self.rung.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(self._interval + 5.0)

    # --- the thread

    def _run(self) -> None:
        turn, seen = 0, None
        while not self._stop.is_set():
            watching = self._round is not None
            # While the agent meets others, the bell is for it.
            rung = self.rung.wait(self._interval) if watching else self._stop.wait(self._interval)
            if rung and watching:
                self.rung.clear()
            turn += 1
            with self._lock:
                store, round = self._store, self._round
            if store is None or self._stop.is_set():
                continue
            try:
                self._give_sign(store) if not rung else None
                if round:
                    self._look(store, round, read=rung or turn % SELDOM == 0 or round is not seen, beats=not rung)
                    seen = round
            except StoreLost as lost:
                if round:
                    self._bear(store, round, lost)

    def _end_of_job(self) -> Round | None:
        """The last round, once it is known to be; remembered when the store that it was read in has gone."""
        if self._closed is None and self._store is not None:
            self._closed = self._store.closed
        return self._closed

    def _give_sign(self, store: RoundStore) -> None:
        if not self._silent:
            self._beat += 1
            store.beat(self._beat)

    def _look(self, store: RoundStore, round: Round, *, read: bool, beats: bool) -> None:
        if self._silent:
            self._find_again(store, round)
            return
        if read and not self._ended:
            self._ended = store.is_ended(round)
        if read and not self._ended:
            self._ended = store.last_round().name != round.name
            with suppress(OSError, FastckptError):  # its errors must not end this thread
                self.each_look(store, round)
        if beats and not self._ended:
            # The first watches all others, and these watch the first: their reads do not grow with the round.
            first = round.ranks.get(self._id) == 0
            watched = [id for id in round.ranks if id != self._id] if first else [round.nodes[0].id]
            if silent := self.silent(watched, store.beats(watched)) if watched else None:
                names = ", ".join(node.host for node in round.nodes if node.id in silent)
                logger.warning(coded("no sign of life from %s: the round ends", "FC-032"), names)
                self.lost(silent)

    def _bear(self, store: RoundStore, round: Round, lost: StoreLost) -> None:
        """Go on without the store, unless its host was in the round, and has ended."""
        if self._silent or self._stop.is_set() or self.is_closed:
            return
        with self._lock:
            if self._store is not store:
                return
            self._silent, self._replaced = True, lost.ended
        if lost.ended:
            self._endpoints.lost(store.connection)
        if lost.ended and self._holder in round.ranks.keys() - {self._id}:
            logger.warning("the node that held the rendezvous' store has ended (%s): the round ends", lost)
            self.lost([self._holder])
        elif self._unreached:
            self._end_cut_off(f" ({lost})")
        else:
            logger.warning("the store of the rendezvous is lost (%s); training goes on while nothing fails", lost)

    def _end_cut_off(self, why: str) -> None:
        logger.warning(
            coded(
                "this node reaches neither most other nodes nor the store of the rendezvous%s: its round ends", "FC-033"
            ),
            why,
        )
        self.lost([*self._unreached])

    def _find_again(self, store: RoundStore, round: Round) -> None:
        if self._ended:
            return  # the next round looks for a store
        with suppress(StoreLost, RendezvousConnectionError):
            # A silent store may be there still, and others in it: only one that has ended is replaced.
            connection = self._endpoints.connect(store.rounds_at, 2 * self._interval, hold=self._replaced)
            found = store.at(connection)
            found.listen(self.rung.set)
            if self._endpoints.holds(connection):
                found.hold()
            last = found.carry_over(round)
            with self._lock:
                if self._round is not round:
                    return
                self._end_of_job()
                self._store, self._silent, self._holder = found, False, found.holder()
                self._ended = self._ended or last.name != round.name
            logger.warning("the rendezvous has a new store, at %s:%d", connection.host, connection.port)


def _tell(store: RoundStore, round: Round, ids: Iterable[str]) -> None:
    with suppress(StoreLost):
        store.report_gone(round, ids)
        store.end(round)
